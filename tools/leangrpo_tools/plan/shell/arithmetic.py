"""Arithmetic of bash: signed 64-bit integers as in C. What bash refuses, what is rare, or not known, is None.

Python's parser reads the expression, once variables and octal or hexadecimal numbers are decimal ones. Sums, products,
powers and shifts are computed: Python groups them as C does, but for a power of a negated number, which is left out.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

_SET = re.compile(r"([A-Za-z_]\w*)\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)")
_LONGEST, _DEEPEST, _LARGEST = 1000, 8, 2**63
_COMPUTE: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: operator.pow,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift,
}  # fmt: skip


class _Unknown(Exception):
    """The value is not known, or bash stops here."""


def assigned(text: str) -> list[str]:
    """Variables that an expression may change."""
    return [first or second for first, second in _SET.findall(text)]


def evaluate(text: str, value: Callable[[str], object], depth: int = 0) -> int | None:
    """The value of an expression that changes nothing; `value` gives a variable's text."""

    def decimal(match: re.Match[str]) -> str:
        word = match[0]
        if word[0].isdigit():
            base = 8 if re.fullmatch(r"0\d+", word) else 16 if word[:2] in ("0x", "0X") else 10
            return str(int(word.replace("_", "no digit"), base))
        found = value(word)
        found = "" if found == () else found  # a variable that is removed counts as 0
        number = evaluate(found, value, depth + 1) if isinstance(found, str) else None
        if number is None:
            raise _Unknown
        return f"({number})"

    try:
        if len(text) > _LONGEST or depth > _DEEPEST or not text.isascii() or re.search(r"\+\+|--|//", text):
            raise _Unknown
        plain = re.sub(r"\w+", decimal, text)
        if not re.fullmatch(r"[-\d\s()+*/%<>]*", plain):
            raise _Unknown
        plain = " ".join(plain.split())
        return _value(ast.parse(plain, mode="eval").body) if plain else 0
    except (_Unknown, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> int:
    found = None
    if isinstance(node, ast.Constant) and type(node.value) is int:
        found = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.operand, (ast.Constant, ast.UnaryOp)):
        found = _value(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    elif isinstance(node, ast.BinOp):
        found = _binary(type(node.op), _value(node.left), _value(node.right))
    if found is None or not -_LARGEST <= found < _LARGEST:
        raise _Unknown
    return found


def _binary(kind: type, left: int, right: int) -> int | None:
    if kind in (ast.Div, ast.Mod) and right:
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)  # towards zero
        return quotient if kind is ast.Div else left - quotient * right
    large = kind in (ast.Pow, ast.LShift, ast.RShift) and not 0 <= right < 64
    return None if large or kind not in _COMPUTE else _COMPUTE[kind](left, right)
