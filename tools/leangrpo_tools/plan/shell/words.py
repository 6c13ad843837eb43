"""Words as bash expands them: quotes, variables, arrays, arithmetic, defaults, and splitting. Rare forms: not known."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from leangrpo_tools.plan.shell import arithmetic
from leangrpo_tools.plan.shell.holes import Holes
from leangrpo_tools.plan.shell.state import HOLE, State, Unknown, Value, known, merge

if TYPE_CHECKING:
    from tree_sitter import Node

OUTPUT = "$COMMAND_OUTPUT"
"""Stands for what a command substitution would have printed."""
ACTIVE, EMPTY, BETWEEN = "\x01", "\x02", "\x03"
"""In a text that is being expanded: the next character is outside quotes; here is something in quotes; the blank
between elements of which one may be none."""
MARKS = re.compile("[\x01-\x03]")
_EXPANSIONS = ("simple_expansion", "expansion", "command_substitution", "arithmetic_expansion", "process_substitution")
_QUOTES = ("string", "raw_string", "ansi_c_string", "translated_string")
_NAME = r"(#?)(\w+|[@*])(?:\[([^\[\]]*)\])?(?:(:?[-=+?])(.*))?"
_PARAMETER = re.compile(rf"\$\{{{_NAME}\}}|\$([A-Za-z_]\w*|\d|[@*])", re.S)
_ELEMENTS = re.compile(r"\$@|\$\{(\w+\[@\]|@)\}")
_ITSELF = re.compile(
    r"S?RANDOM|E?UID|P?PID|(HOST|MACH|OS)TYPE|HOSTNAME|(OLD)?PWD|EPOCH\w+|BASH\w*|OPT(IND|ARG)|_|0|SECONDS|LINENO|GROUPS|"
    r"SHLVL|IFS|REPLY|PATH|HOME|FUNCNAME|DIRSTACK|PIPESTATUS|COLUMNS|LINES"
)
"""Variables that bash itself sets, or changes."""


def _inside(nodes: list[Node], kinds: tuple[str, ...]) -> Iterator[Node]:
    for node in nodes:
        if node.type in kinds:
            yield node
        else:
            yield from _inside(node.children, kinds)


class Words:
    """Expands the words of one text, in the state at their place."""

    def __init__(self, state: State, holes: Holes, defaults: dict[str, str], reasons: dict[str, str]) -> None:
        self.state, self.holes, self._defaults, self._reasons, self.source = state, holes, defaults, reasons, b""

    def text(self, node: Node) -> str:
        """As it is written."""
        return self.source[node.start_byte : node.end_byte].decode()

    def all(self, nodes: list[Node]) -> list[str]:
        """The words that a list of words becomes."""
        groups: list[list[Node]] = []
        for node in nodes:
            touches = groups and groups[-1][-1].end_byte == node.start_byte
            groups[-1].append(node) if touches else groups.append([node])
        found = []
        for group in groups:
            text = self._spans(group, group[0].start_byte, group[-1].end_byte, False)
            if BETWEEN in text and not _ELEMENTS.fullmatch(self.text(group[0]).strip('"')):
                text = self.holes.new(MARKS.sub("", text), many=True)  # what it touches is not known
            found += [self._field(field) for field in re.split("(?:\x01[ \t\n\x03])+", text) if field]
        return found

    def one(self, node: Node) -> str:
        """A text that is neither split nor matched with files, such as the value of an assignment."""
        return self._whole(self._spans([node], node.start_byte, node.end_byte, False))

    def quoted(self, node: Node, start: int, end: int) -> str:
        """Text as between double quotes, from one byte of the source to another."""
        return self._whole(self._spans([node], start, end, True))

    def _whole(self, text: str) -> str:
        plain = MARKS.sub("", text)
        return self.holes.new(plain) if BETWEEN in text else plain

    def _field(self, text: str) -> str:
        plain = MARKS.sub("", text)
        files = re.search(r"\x01[*?\\]|\x01\[.*\]", text, re.S) and not text.startswith("-")
        braces = re.search(r"\x01\{.*(?:,|\.\.).*\}", text, re.S)
        vanishing = len(text) > 1 and not HOLE.sub("", text) and self.holes.is_many(text)
        return self.holes.new(plain, many=True) if files or braces or vanishing else plain

    def _spans(self, nodes: list[Node], start: int, end: int, quoted: bool) -> str:
        """Expansions, quotes, and the text between them, from one byte of the source to another."""
        made = ""
        for child in _inside(nodes, _EXPANSIONS if quoted else _EXPANSIONS + _QUOTES):
            at = child.start_byte
            if at >= start:
                while self.source[at : at + 1].isspace():  # the parser counts spaces before an expansion
                    at += 1
                made += self._literal(self.source[start:at].decode(), quoted) + self._special(child, at, quoted)
                start = child.end_byte
        return made + self._literal(self.source[start:end].decode(), quoted)

    def _literal(self, text: str, quoted: bool) -> str:
        odd = r"\$[\w{(@*#?!$-]|`" if quoted else r"[\n'\"`<>|&;()$]"
        if re.search(odd, re.sub(r"\\.", "", text, flags=re.S)):  # the parser passed something over
            return self.holes.new(text, many=not quoted)
        if quoted:
            return re.sub(r'\\([$`"\\\n])', lambda match: match[1].strip("\n"), text)
        text = re.sub(r"(^|[=:])~[^/:]*", lambda match: match[1] + self.holes.new("$HOME"), text)
        text = re.sub(r"(?<!\\)((?:\\\\)*)([*?\[{ \t])", rf"\1{ACTIVE}\2", text)
        return re.sub(r"\\(\n|.)", lambda match: EMPTY + match[1] if match[1] != "\n" else "", text)

    def _special(self, node: Node, start: int, quoted: bool) -> str:
        text = self.source[start : node.end_byte].decode()
        if node.type == "string" and not node.has_error:
            elements = any(_ELEMENTS.fullmatch(self.text(child).strip()) for child in node.children)  # none: no word
            return ("" if elements else EMPTY) + self._spans([node], start + 1, node.end_byte - 1, True)
        if node.type == "raw_string" or (node.type == "ansi_c_string" and "\\" not in text):
            return EMPTY + text[text.index("'") + 1 : -1]
        if node.type == "arithmetic_expansion" and text[1] == "(":
            number = self.number(self.quoted(node, start + 3, node.end_byte - 2))
            made = None if number is None else str(number)
        elif node.type.endswith("substitution"):
            made, text = None, OUTPUT
        else:
            made = None if node.has_error else self._parameter(node, text, quoted)
        if isinstance(made, str):
            return made
        return self.holes.new(text, made, many=not quoted or bool(_ELEMENTS.fullmatch(text)))

    def number(self, text: str) -> int | None:
        """The value of an expression. Variables that it may change are not known afterwards."""
        changed = arithmetic.assigned(text)
        self.state.variables.update({name: Unknown("it is computed") for name in changed})
        return None if changed else arithmetic.evaluate(text, self.lookup)

    def lookup(self, name: str) -> Value | None:
        """The value of a variable; None where the environment decides."""
        if _ITSELF.fullmatch(name):
            return Unknown("bash sets it")
        given = self.state.variables.get("@")
        if name.isdigit() and isinstance(given, tuple):
            found = given[: int(name)]
            return Unknown() if self.holes.is_many(found) else found[-1] if len(found) == int(name) else ()
        name = "@" if name == "*" or name.isdigit() else name
        return self.state.variables.get(name, Unknown(self.state.lost) if self.state.lost else None)

    def _parameter(self, node: Node, text: str, quoted: bool) -> Value | None:
        """What a variable becomes: its text, ready; else what it may be."""
        match = _PARAMETER.fullmatch("${#@}" if text in ("$#", "${#}") else text)
        if match is None:
            return None
        sign, name, index, operation, rest = match[1], match[2] or match[6], match[3], match[4], match[5]
        index = name if name in "@*" else index
        value = self.lookup(name)
        if isinstance(value, Unknown):
            self._reasons.update({name: value.why} if value.why else {})
            if index == "*" or not (sign or operation or index not in (None, "@")):
                return value
        items = (value,) if isinstance(value, str) else value
        if index in ("@", "*"):
            return self._elements(items, sign, index, quoted) if isinstance(items, tuple) and not operation else None
        if index is not None or isinstance(value, tuple):
            place = self.number(index or "0")
            if not isinstance(items, tuple) or place is None or place < -len(items) or self.holes.is_many(items):
                return None
            value = items[place] if place < len(items) else ()
        if sign:
            return str(len(value)) if isinstance(value, (str, tuple)) and known(value) and not operation else None
        if operation:
            return self._operate(node, name, value, operation, rest, quoted)
        return value if value is None or isinstance(value, Unknown) else self._split("".join(value), quoted)

    def _split(self, text: str, quoted: bool) -> str:
        """Text of a variable: outside quotes, blanks in it split."""
        if quoted:
            return text
        if "IFS" in self.state.variables:
            return self.holes.new(f"${text}", many=True)
        return re.sub(r"[ \t\n*?\[\\]", lambda match: ACTIVE + match[0], self.holes.widened(text))

    def _elements(self, items: tuple[str, ...], sign: str | None, index: str, quoted: bool) -> str | None:
        many = self.holes.is_many(items)
        if sign or (quoted and index == "*"):
            unsure = many or "IFS" in self.state.variables
            return None if unsure else str(len(items)) if sign else " ".join(items)
        words = [self._split(item, quoted) for item in items]
        words = [EMPTY + word if quoted and not self.holes.is_many(word) else word for word in words]
        return (ACTIVE + (BETWEEN if many else " ")).join(words)

    def _operate(
        self, node: Node, name: str, value: Value | None, operation: str, rest: str, quoted: bool
    ) -> Value | None:
        """What becomes of `${NAME:-WORD}` and its like."""
        kind, empty = operation[-1], operation[0] == ":"
        names = re.findall(r"\$\{(\w+):?=", rest)
        self.state.variables.update({changed: Unknown("it may be set in a default") for changed in names})
        absent = value == () or (empty and value == "") or (value is None and kind in "-=")
        present = isinstance(value, str) and (not empty or bool(HOLE.sub("", value)))
        if present and kind != "+":
            return self._split(str(value), quoted)
        if kind == "?" or (absent and kind == "+"):
            return "" if kind == "+" else None
        if kind == "=":
            self.state.variables[name] = Unknown("it may have been set before")
        if (quoted and re.search(r"[\\'\"]", rest)) or rest.startswith("~"):
            return None
        word = self._spans([node], node.end_byte - 1 - len(rest.encode()), node.end_byte - 1, quoted)
        plain = self._whole(word)
        if value is None and absent:
            self._defaults[name] = self.holes.show(plain)
        found = plain if absent else merge([value, plain, None], "it may have been set before")
        if kind == "=":
            self.state.variables[name] = found
        if absent or present:
            return self._split(plain, quoted) if kind == "=" else word
        return found if kind in "-=" else None
