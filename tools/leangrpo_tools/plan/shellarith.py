"""Arithmetic of bash: signed 64-bit integers, with the precedence of C. What bash refuses, or is not known, is None."""

from __future__ import annotations

import re
from collections.abc import Callable

_TOKEN = re.compile(r"\s*(0[xX][0-9a-fA-F]+|\d+#\w+|\d+|[A-Za-z_]\w*|\*\*|<<=|>>=|\+\+|--|[-+*/%&|^]=|<<|>>|[<>=!]=|"
                    r"&&|\|\||[-+*/%<>&|^!~?:()=,])")  # fmt: skip
_LEVELS = ["||", "&&", "|", "^", "&", "== !=", "< <= > >=", "<< >>", "+ -", "* / %", "**"]
_PRIORITY = {name: level for level, names in enumerate(_LEVELS, 1) for name in names.split()}
_SET = re.compile(r"([A-Za-z_]\w*)\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)")
_LONGEST = 1000


class _Unknown(Exception):
    """The value is not known, or bash stops here."""


def assigned(text: str) -> list[str]:
    """Variables that an expression may change."""
    return [first or second for first, second in _SET.findall(text)]


def evaluate(
    text: str, value: Callable[[str], str | None], put: Callable[[str, str], None], depth: int = 0
) -> int | None:
    """The value of an expression; `value` gives a variable's text (None: not known), `put` changes one."""
    lazy = re.search(r"&&|\|\||\?", text)
    if len(text) > _LONGEST or depth > 8 or "\x00" in text or (lazy and assigned(text)):
        return None
    tokens, at = [], 0
    text = text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            return None
        tokens.append(match[1])
        at = match.end()
    try:
        reader = _Reader(tokens, value, put, depth)
        found = reader.sequence() if tokens else 0
        return found if not reader.tokens else None
    except (_Unknown, RecursionError):
        return None


class _Reader:
    def __init__(self, tokens: list[str], value: Callable, put: Callable, depth: int) -> None:
        self.tokens, self._value, self._put, self._depth = tokens[::-1], value, put, depth

    def _take(self, *wanted: str) -> str | None:
        return self.tokens.pop() if self.tokens and self.tokens[-1] in wanted else None

    def _need(self, token: str) -> None:
        if self._take(token) is None:
            raise _Unknown

    def sequence(self) -> int:
        found = self._choice()
        while self._take(","):
            found = self._choice()
        return found

    def _choice(self) -> int:
        test = self._binary(1)
        if not self._take("?"):
            return test
        first = self.sequence()
        self._need(":")
        second = self._choice()
        return first if test else second

    def _binary(self, least: int) -> int:
        left = self._unary()
        while self.tokens and _PRIORITY.get(self.tokens[-1], 0) >= least:
            name = self.tokens.pop()
            left = _apply(name, left, self._binary(_PRIORITY[name] + (name != "**")))
        return left

    def _unary(self) -> int:
        name = self._take("+", "-", "!", "~", "++", "--")
        if name in ("++", "--"):
            variable = self._name(self.tokens.pop() if self.tokens else "")
            return self._store(variable, self._number(variable) + (1 if name == "++" else -1))
        if name:
            inner = self._unary()
            return _wrap({"+": inner, "-": -inner, "!": int(not inner), "~": ~inner}[name])
        if self._take("("):
            found = self.sequence()
            self._need(")")
            return found
        token = self.tokens.pop() if self.tokens else ""
        return _literal(token) if token[:1].isdigit() else self._variable(self._name(token))

    def _name(self, token: str) -> str:
        if not re.fullmatch(r"[A-Za-z_]\w*", token):
            raise _Unknown
        return token

    def _variable(self, name: str) -> int:
        if step := self._take("++", "--"):
            old = self._number(name)
            self._store(name, old + (1 if step == "++" else -1))
            return old
        if self._take("="):
            return self._store(name, self._choice())
        if self.tokens and re.fullmatch(r"(?:[-+*/%&|^]|<<|>>)=", self.tokens[-1]):
            change = self.tokens.pop()[:-1]
            return self._store(name, _apply(change, self._number(name), self._choice()))
        return self._number(name)

    def _store(self, name: str, number: int) -> int:
        self._put(name, str(_wrap(number)))
        return _wrap(number)

    def _number(self, name: str) -> int:
        text = self._value(name)
        found = None if text is None else evaluate(text, self._value, self._put, self._depth + 1)
        if found is None:
            raise _Unknown
        return found


def _wrap(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def _literal(token: str) -> int:
    try:
        base, sign, digits = token.partition("#")
        if sign:
            return _wrap(int(digits, int(base))) if int(base) in range(2, 37) and "_" not in digits else _fail()
        octal = len(token) > 1 and token[0] == "0" and token[1] not in "xX"
        return _wrap(int(token, 8 if octal else 16 if token[1:2] in ("x", "X") else 10))
    except ValueError:
        return _fail()


def _fail() -> int:
    raise _Unknown


def _apply(name: str, left: int, right: int) -> int:
    if (name in "/%" and right == 0) or (name == "**" and right < 0) or (name in ("<<", ">>") and not 0 <= right < 64):
        raise _Unknown
    if name in "/%":
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return _wrap(quotient if name == "/" else left - quotient * right)
    made: dict[str, Callable[[], int]] = {
        "||": lambda: int(bool(left or right)), "&&": lambda: int(bool(left and right)), "|": lambda: left | right,
        "^": lambda: left ^ right, "&": lambda: left & right, "==": lambda: int(left == right),
        "!=": lambda: int(left != right), "<": lambda: int(left < right), "<=": lambda: int(left <= right),
        ">": lambda: int(left > right), ">=": lambda: int(left >= right), "<<": lambda: left << right,
        ">>": lambda: left >> right, "+": lambda: left + right, "-": lambda: left - right,
        "*": lambda: left * right, "**": lambda: pow(left, right, 2**64),
    }  # fmt: skip
    return _wrap(made[name]())
