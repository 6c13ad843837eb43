"""Expansion of words as bash does it: quotes, variables, arrays, arithmetic, defaults, and splitting into words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from leangrpo_tools.plan import shellarith
from leangrpo_tools.plan.shellvalue import HOLE, Hidden, State, Unknown, Unset, Value, known, merge

if TYPE_CHECKING:
    from tree_sitter import Node

OUTPUT = "$COMMAND_OUTPUT"
"""Stands for what a command substitution would have printed."""
_EXPANSIONS = ("simple_expansion", "expansion", "command_substitution", "arithmetic_expansion", "process_substitution")
_QUOTED = ("string", "raw_string", "ansi_c_string", "translated_string")
_PARAMETER = re.compile(r"\$\{([#!]?)(\w+|[@*#?$!-])(?:\[([^\[\]]*)\])?([^\w\[].*)?\}|\$(\w+|[@*#?$!-])", re.S)
_OPERATION = re.compile(r":?[-=+?]|%%?|##?|//?|:|\^\^?|,,?|@")
_ITSELF_TEXT = (
    "RANDOM SRANDOM SECONDS LINENO BASHPID PPID UID EUID GROUPS HOSTNAME HOSTTYPE MACHTYPE OSTYPE PWD OLDPWD SHLVL IFS "
    "OPTIND OPTARG REPLY PATH HOME EPOCHSECONDS EPOCHREALTIME FUNCNAME DIRSTACK PIPESTATUS COLUMNS LINES _"
)
_ITSELF = frozenset(_ITSELF_TEXT.split())
"""Variables that bash itself sets, or changes."""
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}


class Expander:
    """Expands the words of one text. Parts that are not known are holes: `HOLE` matches them, `show` resolves them."""

    def __init__(self, state: State, holes: list[tuple[str, Value, bool]], defaults: dict[str, str]) -> None:
        self.state, self._holes, self.defaults, self.source, self.depth = state, holes, defaults, b"", 0

    def text(self, node: Node) -> str:
        return self.source[node.start_byte : node.end_byte].decode()

    def _begin(self, node: Node) -> int:
        """Where an expansion begins: the parser counts spaces before it, too."""
        at = node.start_byte
        while self.source[at : at + 1] not in (b"$", b"`", b"<", b">", b""):
            at += 1
        return at

    def hole(self, display: str, value: Value | None = None, many: bool = False) -> str:
        """A part that is not known, written as the file does, with what it may be."""
        display = HOLE.sub(lambda match: self._holes[int(match[1])][0], display)
        display = display[:200]
        self._holes.append((display if "$" in display else f"$<{display}>", value or Unknown(""), many))
        return f"\x00{len(self._holes) - 1}\x01"

    def is_many(self, text: str) -> bool:
        """Whether the word may stand for several, or for none."""
        return any(self._holes[int(number)][2] for number in HOLE.findall(text))

    def _widened(self, match: re.Match[str]) -> str:
        """A part that is not known, outside quotes."""
        display, value, many = self._holes[int(match[1])]
        return match[0] if many else self.hole(display, value, many=True)

    def show(self, text: str, depth: int = 0) -> str:
        """A word for readers of commands."""
        word = HOLE.sub(lambda match: self._holes[int(match[1])][0], text)
        if not text or HOLE.sub("", text):
            return word
        hidden = Hidden(word)
        _, value, hidden.many = self._holes[int(HOLE.findall(text)[0])]
        if isinstance(value, Unknown) and depth < 3:
            hidden.closed = value.closed
            for item in value.alternatives:
                parts = [] if isinstance(item, Unset) else [item] if isinstance(item, str) else list(item)
                parts = [word for part in parts for word in (part.split() if hidden.many else [part])]
                hidden.alternatives += (tuple(self.show(part, depth + 1) for part in parts),)
        return hidden

    def words(self, nodes: list[Node]) -> list[str]:
        """The words that a list of words becomes."""
        found: list[list[tuple]] = []
        end = -1
        for node in nodes:
            found += [[]] if node.start_byte != end else []  # what touches is one word
            found[-1].extend(self._pieces(node))
            end = node.end_byte
        return [word for pieces in found for word in self._fields(pieces)]

    def one(self, node: Node) -> str:
        """A text that is neither split nor matched with files, such as the value of an assignment."""
        made = ""
        for text, kind in self._pieces(node):
            made += text if isinstance(text, str) else " ".join(text)
            if kind == "plain" and re.search(r"(?:^|:)~", text):
                return self.hole(self.text(node))
        return made

    def _fields(self, pieces: list[tuple]) -> list[str]:
        found: list[str] = []
        now: str | None = None
        globs = braces = ""
        for text, kind in pieces:
            if kind == "elements":
                for place, element in enumerate(text):
                    if place:
                        found.append(now or "")
                        now = ""
                    now = (now or "") + element
            elif kind != "split":
                now = (now or "") + text
                globs, braces = globs + text * (kind == "plain"), braces + text * (kind == "plain")
            else:
                globs += text
                parts = re.split(r"[ \t\n]+", HOLE.sub(self._widened, text))
                for place, part in enumerate(parts):
                    if place and now is not None:
                        found.append(now)
                        now = None
                    now = (now or "") + part if part else now
        found += [now] if now is not None else []
        tilde = pieces and pieces[0][1] == "plain" and re.match(r"~|[A-Za-z_]\w*=(?:.*:)?~", pieces[0][0])
        loose = any(kind == "elements" and any(map(self.is_many, text)) for text, kind in pieces)
        if loose and sum(bool(text) for text, _ in pieces) > 1:
            return [self.hole(self.joined(pieces), many=True)]
        if (
            tilde
            or re.search(r"\{.*(?:,|\.\.).*\}", braces)
            or (re.search(r"[*?\\]|\[.*\]", globs) and globs[0] != "-")
        ):
            whole = "".join(text if isinstance(text, str) else " ".join(text) for text, _ in pieces)
            return [self.hole(whole, many=not tilde)]
        return found

    def _pieces(self, node: Node) -> list[tuple]:
        """Parts with what becomes of them: `plain` (unquoted), `quoted`, `split` or `elements`."""
        kind, text = node.type, self.text(node)
        if kind == "$" or text[:1].isspace():
            return [(self.hole(text, many=True), "quoted")]
        if kind in ("concatenation", "command_name", "word", "number", "variable_name"):
            children = node.children if kind in ("concatenation", "command_name") else []
            return self._spans(node, children) if children else [self._plain(text)]
        if kind == "raw_string":
            return [(text[1:-1], "quoted")]
        if kind in ("string", "translated_string"):
            return self._string(node)
        if kind == "ansi_c_string":
            known_escapes = not re.search(r"\\[^ntr\\'\"]", text)
            made = re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], ""), text[2:-1])
            return [(made if known_escapes else self.hole(text), "quoted")]
        if kind in _EXPANSIONS:
            return self._expansion(node, quoted=False)
        return [self._plain(text)] if not node.children else [(self.hole(text, many=True), "quoted")]

    def _spans(self, node: Node, children: list[Node]) -> list[tuple]:
        """Children, and the text between them that the parser passed over."""
        found: list[tuple] = []
        at = node.start_byte
        for child in [*children, None]:
            end = child.start_byte if child else node.end_byte
            found += [self._plain(self.source[at:end].decode())] if end > at else []
            found += self._pieces(child) if child else []
            at = child.end_byte if child else at
        return found

    def _plain(self, text: str) -> tuple:
        bare = re.sub(r"\\.", "", text, flags=re.S)
        if re.search(r"[\s'\"`<>|&;()]|\$.", bare):
            return (self.hole(text, many=True), "quoted")
        marked = re.sub(r"\\([*?\[\]{}~,])", "\x02\\1", text)  # an escaped character has no meaning of its own
        plain = re.sub(r"\\(.)", lambda match: "" if match[1] == "\n" else match[1], marked, flags=re.S)
        return (plain.replace("\x02", ""), "quoted" if "\\" in text else "plain")

    def _string(self, node: Node) -> list[tuple]:
        return self.quoted(node, node.start_byte + (1 if node.type == "string" else 2), node.end_byte - 1)

    def quoted(self, node: Node, start: int, end: int, escaped: str = '$`"\\\\') -> list[tuple]:
        """Text as between double quotes, from one byte of the source to another."""
        found: list[tuple] = [("", "quoted")]
        inner = (
            [child for child in node.children if child.type == "string"] if node.type == "translated_string" else [node]
        )
        children = [child for part in inner for child in part.children if child.type in _EXPANSIONS]
        for child in [*children, None]:
            text = self.source[start : self._begin(child) if child else end].decode()
            text = re.sub(rf"\\([{escaped}\n])", lambda match: match[1].strip("\n"), text)
            found.append((text, "quoted"))
            found += self._expansion(child, quoted=True) if child else []
            start = child.end_byte if child else start
        return found if any(kind == "elements" for _, kind in found) and len(found) > 3 else self._empty(found)

    def _empty(self, found: list[tuple]) -> list[tuple]:
        """`"$@"` without arguments is no word, though `""` is one."""
        return [item for item in found if item[1] == "elements"] or found

    def joined(self, pieces: list[tuple]) -> str:
        """Pieces as one text."""
        return "".join(text if isinstance(text, str) else " ".join(text) for text, _ in pieces)

    def _expansion(self, node: Node, quoted: bool) -> list[tuple]:
        start = self._begin(node)
        kind, text = "quoted" if quoted else "split", self.source[start : node.end_byte].decode()
        self.depth += 1
        try:
            if self.depth > 20 or node.has_error:
                return [(self.hole(text, many=not quoted), kind)]
            if node.type == "arithmetic_expansion":
                inner = 2 if text.startswith("$[") else 3
                number = self.arithmetic(self.joined(self.quoted(node, start + inner, node.end_byte - inner + 1)))
                return [(self.hole(text) if number is None else str(number), kind)]
            if node.type in ("command_substitution", "process_substitution"):
                return [(self.hole(OUTPUT, many=not quoted), kind)]
            return [self._parameter(node, text, quoted)]
        finally:
            self.depth -= 1

    def arithmetic(self, text: str) -> int | None:
        """The value of an expression. Variables that it would have changed are unknown where it is not known."""

        def value(name: str) -> str | None:
            found = self.lookup(name)
            return "" if isinstance(found, Unset) else found if isinstance(found, str) and known(found) else None

        found = shellarith.evaluate(text, value, self.state.variables.__setitem__)
        for name in shellarith.assigned(text) if found is None else []:
            self.state.variables[name] = Unknown("it is computed")
        return found

    def lookup(self, name: str) -> Value | None:
        """The value of a variable; None where the environment decides."""
        if name.isdigit() or name in ("@", "*"):
            given = self.state.arguments
            if given is None and name != "0":
                return None
            if not isinstance(given, tuple) or name == "0" or (name.isdigit() and any(map(self.is_many, given))):
                return Unknown("it is no part of the file")
            return given if name in "@*" else given[int(name) - 1] if int(name) <= len(given) else Unset()
        if name.startswith("LEANGRPO_HOLE_"):
            return self._holes[int(name[14:])][1]
        if name in _ITSELF or name.startswith("BASH") or (not name[0].isalpha() and name[0] != "_"):
            return Unknown("bash sets it")
        return self.state.variables.get(name, Unknown(self.state.lost) if self.state.lost else None)

    def _parameter(self, node: Node, text: str, quoted: bool) -> tuple:
        kind, match = "quoted" if quoted else "split", _PARAMETER.fullmatch(text)
        name = (match[2] or match[5]) if match else "?"
        sign, index, rest = (match[1], match[3], match[4] or "") if match else ("", None, "")
        value = self.lookup(name)
        if name.startswith("LEANGRPO_HOLE_"):
            return (f"\x00{name[14:]}\x01", kind)
        if name in ("@", "*"):
            index = name
        unknown = (self.hole(text, value if not rest and not sign else None, many=not quoted or index == "@"), kind)
        operation = _OPERATION.match(rest)
        given = self.state.arguments
        if not match or sign == "!" or (match[5] and len(name) > 1 and name.isdigit()):
            return unknown
        if name == "#":
            sure = isinstance(given, tuple) and not any(map(self.is_many, given)) and not rest and not sign
            return (str(len(given)), kind) if sure and isinstance(given, tuple) else unknown
        if index is not None:
            if rest or value is None or isinstance(value, Unknown):
                return unknown
            items = value if isinstance(value, tuple) else () if isinstance(value, Unset) else (value,)
            if index in ("@", "*"):
                if sign:
                    return (str(len(items)), kind) if not any(map(self.is_many, items)) else unknown
                return (items, "elements") if quoted and index == "@" else (" ".join(items), kind)
            place = self.arithmetic(index)
            if place is None or any(map(self.is_many, items)) or not -len(items) <= place:
                return unknown
            value = items[place] if place < len(items) else Unset()
        elif isinstance(value, tuple):
            if value and self.is_many(value[0]):
                return unknown
            value = value[0] if value else Unset()
        if sign:
            return (
                (str(len(value)) if isinstance(value, str) else "0", kind)
                if value is not None and known(value) and not rest
                else unknown
            )
        if not rest:
            whole = isinstance(value, str) and "\x00" in value and not HOLE.sub("", value)
            plain = isinstance(value, (str, Unset)) and not whole
            return (
                (value if isinstance(value, str) else "", kind)
                if plain
                else self._again(unknown, text, value, kind, quoted)
            )
        return (
            self._operate(node, name, value, operation[0], rest[operation.end() :], quoted) or unknown
            if operation
            else unknown
        )

    def _again(self, unknown: tuple, text: str, value: Value | None, kind: str, quoted: bool) -> tuple:
        """A variable whose whole value is a part that is not known keeps what that may be."""
        if not isinstance(value, str):
            return unknown
        _, inner, _ = self._holes[int(HOLE.findall(value)[0])]
        return (self.hole(text, inner if isinstance(inner, Unknown) else None, many=not quoted), kind)

    def _operate(
        self, node: Node, name: str, value: Value | None, operation: str, rest: str, quoted: bool
    ) -> tuple | None:
        kind = "quoted" if quoted else "split"
        if operation.strip(":") in ("-", "=", "+", "?") and operation != ":":
            other = self._operand(node, rest, quoted)
            absent = isinstance(value, Unset) or (value == "" and operation[0] == ":")
            if operation[-1] in "-=" and value is None and name[0].isalnum() | (name[0] == "_"):
                self.defaults[name] = self.show(other[0]) if other else rest
                absent = True
            sure = absent or (isinstance(value, str) and (operation[0] != ":" or bool(HOLE.sub("", value))))
            if operation[-1] == "?":
                return (value, kind) if isinstance(value, str) and sure and not absent else None
            if not sure or (other is None and (operation[-1] == "+") != absent):
                alternatives = [value, other[0]] if other and operation[-1] in "-=" else []
                found = merge([*alternatives, None], "it may have been set before") if alternatives else None
                if operation[-1] == "=":
                    self.state.variables[name] = found or Unknown("it may have been set before")
                return (self.hole(self.text(node).strip(), found, many=not quoted), kind)
            if operation[-1] == "+":
                return ("", kind) if absent else other
            if absent and operation[-1] == "=" and other:
                self.state.variables[name] = other[0]
                return (other[0], kind)
            return other if absent else (value, kind)
        if isinstance(value, Unset):
            value = ""
        if not isinstance(value, str) or not known(value):
            return None
        if operation[0] in "%#" and not re.search(r"[\\'\"\[\]$`]|[?*+@!]\(", rest):
            pattern = re.compile("".join(".*" if c == "*" else "." if c == "?" else re.escape(c) for c in rest), re.S)
            places = range(len(value) + 1)
            ends = [at for at in places if pattern.fullmatch(value[at:] if operation[0] == "%" else value[:at])]
            if not ends:
                return (value, kind)
            longest = len(operation) == 2
            return (value[: min(ends) if longest else max(ends)], kind) if operation[0] == "%" else (
                value[max(ends) if longest else min(ends) :], kind)  # fmt: skip
        if operation[0] == "/" and re.fullmatch(r"[\w.,:=@ -]+/[\w.,:=@ -]*|[\w.,:=@ -]+", rest):
            old, _, new = rest.partition("/")
            return (value.replace(old, new, -1 if operation == "//" else 1), kind)
        if operation == ":" and (span := re.fullmatch(r"(\d+)(?::(\d+))?", rest)) and int(span[1]) <= len(value):
            return (value[int(span[1]) :][: int(span[2]) if span[2] else None], kind)
        if operation in ("^^", ",,") and not rest and value.isascii():
            return (value.upper() if operation == "^^" else value.lower(), kind)
        return None

    def _operand(self, node: Node, rest: str, quoted: bool) -> tuple | None:
        """The word after `:-` and its like."""
        kind = "quoted" if quoted else "split"
        if match := re.fullmatch(r'"([^"`\\$]*)"', rest):
            return (match[1], "quoted")
        if re.search(r"[\\'\"`]", rest) or rest.startswith("~"):
            return None
        inner = [child for child in node.children if child.type not in ("${", "}")]
        nested = [child for child in _walk(inner) if child.type in _EXPANSIONS]
        start = node.end_byte - 1 - len(rest.encode())
        made = ""
        for child in [*nested, None]:
            made += self.source[start : self._begin(child) if child else node.end_byte - 1].decode()
            made += self.joined(self._expansion(child, quoted)) if child else ""
            start = child.end_byte if child else start
        return (made, kind)


def _walk(nodes: list[Node]) -> list[Node]:
    """The outermost expansions among nodes."""
    found: list[Node] = []
    for node in nodes:
        found += [node] if node.type in _EXPANSIONS else _walk(node.children)
    return found
