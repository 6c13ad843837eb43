"""A bash launch file, read as text: its commands as lists of words. Nothing is ever executed.

tree-sitter parses it; what each word becomes is worked out in `shellexpand.py`. Here statements are followed in order:
both branches of an `if`, loops until nothing changes, functions where they are called, and commands in strings that
another shell gets. A word that is not known keeps a dollar sign, and is `Hidden` where it stands for whole words.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from leangrpo_tools.errors import KitError
from leangrpo_tools.plan.shellexpand import OUTPUT, Expander
from leangrpo_tools.plan.shellvalue import HOLE, Hidden, State, Unknown, Unset, Value, join, known, merge

if TYPE_CHECKING:
    from tree_sitter import Node

__all__ = ["OUTPUT", "Command", "Hidden", "Reading", "read"]
_SECONDS, _DEEPEST, _UNROLLED, _LONGEST = 1.2, 40, 32, 10_000
_SHELLS, _REMOTE = ("bash", "sh", "zsh", "dash"), ("ssh", "pdsh")
_PASSING = frozenset(["exec", "env", "nohup", "time", "command", "nice", "srun", "timeout", "stdbuf", "setsid"])
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.S)
_READS = ("read", "mapfile", "readarray", "getopts", "printf", "wait")


@dataclass(frozen=True)
class Command:
    """One simple command.

    Attributes:
        line: where it starts, from 1.
        words: as far as they are known.
        outer: words of the commands that hand this one on in a string, outermost first.
        exports: environment variables that the file gives it.
    """

    line: int
    words: list[str]
    outer: list[str] = field(default_factory=list)
    exports: dict[str, str] = field(default_factory=dict)


@dataclass
class Reading:
    """What was read.

    Attributes:
        commands: in order.
        notes: what a reader should know about the text itself.
        defaults: values that the file takes where the environment gives none, as in `${NAME:-8}`.
        reasons: why a variable is not known.
    """

    commands: list[Command] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    defaults: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


class _Late(Exception):
    """The file takes too long."""


def read(text: str) -> Reading:
    """Read the text of a launch file. Takes about two seconds at most. Raises LG501 without the parser."""
    reading = Reading()
    text = text.removeprefix("\ufeff").replace("\0", "")
    if "\r" in text:
        reading.notes.append("the launch file has Windows line ends: bash on Linux will not run it as it is")
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    reader = _Reader(reading, State(), [], time.monotonic() + _SECONDS, 0)
    try:
        reader.text_of(text)
        reader.uncalled()
    except (_Late, RecursionError):
        reading.notes.append("the launch file is too long or too deeply nested: not all of it was read")
    return reading


def _parsed(source: bytes, until: float) -> Node:
    try:
        from tree_sitter import Language, Parser
        from tree_sitter_bash import language
    except ImportError as err:
        fix = "pip install tree-sitter tree-sitter-bash"
        raise KitError("LG501", "launch files cannot be read here", cause=str(err), fix=fix) from err

    def late(*_: object) -> bool:
        return time.monotonic() > until

    try:
        parser = Parser(Language(language()))
        tree = parser.parse(lambda at, _: source[at : at + 65536], progress_callback=late)
    except ValueError as err:
        raise _Late from err
    return tree.root_node


class _Reader:
    def __init__(self, reading: Reading, state: State, holes: list, until: float, depth: int) -> None:
        self.reading, self.state, self._until, self._depth = reading, state, until, depth
        self._holes, self._line, self._first = holes, 0, 0
        self._expand = Expander(state, holes, reading.defaults)
        self._escapes: list[list[State]] = []
        self._functions: dict[str, tuple[bytes, Node]] = {}
        self._called: set[str] = set()
        self._ever: dict[str, Value] = {}
        self._doubt: str | None = None
        self._texts: list[str] = []  # here-documents of the next command

    # texts

    def text_of(self, text: str) -> None:
        """Follow the statements of a text; after one that is not understood, from the next line on."""
        text = text.rstrip()
        if (len(text) - len(text.rstrip("\\"))) % 2:
            text = text[:-1]
        before, first = self._expand.source, self._first
        lines = text.split("\n")
        self._first = at = first
        while text:
            self._expand.source = text.encode()
            self._first = at
            root = _parsed(self._expand.source, self._until)
            broken = next((node for node in root.children if node.type == "ERROR" or node.is_missing), None)
            if root.type == "ERROR":
                broken = root
            row = None if broken is None else broken.start_point[0] if root is not broken else self._error_row(root)
            whole = [node for node in root.children if row is None or node.end_point[0] < row]
            self._block(whole if root is not broken else [])
            if row is None:
                break
            self._misread(at + row + 1, text)
            lines = lines[row + 1 :]
            text, at = "\n".join(lines), at + row + 1
        self._expand.source, self._first = before, first

    def _error_row(self, root: Node) -> int:
        node = root
        while True:
            inner = next((child for child in node.children if child.has_error or child.is_missing), None)
            if inner is None:
                return node.start_point[0]
            node = inner

    def _misread(self, line: int, text: str) -> None:
        self.reading.notes.append(f"line {line} was not understood and left out")
        self._doubt = f"line {line} was not understood"
        for name in dict.fromkeys(re.findall(r"([A-Za-z_]\w*)\+?=", text)):
            self._put(name, Unknown(self._doubt))
        self.state.lose(self._doubt)

    def uncalled(self) -> None:
        """Functions that the file never calls by name: another program may."""
        for name, (source, body) in list(self._functions.items()):
            if name not in self._called:
                self._set(
                    State(dict(self._ever), set(self.state.exported), None, self.state.functions, self.state.lost)
                )
                self._expand.source = source
                self._run(body)

    # state

    def _set(self, state: State) -> None:
        self.state = self._expand.state = state
        found = {name: value.why for name, value in state.variables.items() if isinstance(value, Unknown)}
        self.reading.reasons.update({name: why for name, why in found.items() if why})

    def _put(self, name: str, value: Value, index: str | None = None) -> None:
        if index is not None:
            value = self._element(name, value, index)
        if isinstance(value, (str, tuple)) and (len(value) > _LONGEST or sum(map(len, value)) > _LONGEST):
            value = Unknown(f"line {self._line}: it is too long")
        if self._doubt:
            value = merge([self.state.variables.get(name), value, None], self._doubt)
        if isinstance(value, Unknown) and not value.why:
            value = Unknown(f"line {self._line}", value.alternatives)
        self.state.variables[name] = value
        self._ever[name] = merge([self._ever[name], value], "it has several values") if name in self._ever else value
        if not known(value):
            self.reading.reasons[name] = value.why if isinstance(value, Unknown) else f"line {self._line}"

    def _element(self, name: str, value: Value, index: str) -> Value:
        old = self.state.variables.get(name, Unset())
        items = () if isinstance(old, Unset) else (old,) if isinstance(old, str) else old
        place = self._expand.arithmetic(index) if isinstance(items, tuple) else None
        if place is None or not isinstance(items, tuple) or not isinstance(value, str):
            return Unknown(f"line {self._line}: {name}[{index}]")
        if any(map(self._expand.is_many, items)) or not 0 <= place <= len(items):
            return Unknown(f"line {self._line}: {name}[{index}]")
        return (*items[:place], value, *items[place + 1 :])

    # statements

    def _block(self, nodes: list[Node]) -> None:
        for place, node in enumerate(nodes):
            if self.state.dead:
                return
            background = place + 1 < len(nodes) and nodes[place + 1].type == "&"
            if node.is_named and node.type != "comment":
                self._aside([node]) if background else self._run(node)

    def _aside(self, nodes: list[Node]) -> None:
        """In a shell of its own: nothing comes back."""
        before = self.state
        self._set(before.copy())
        self._block(nodes)
        self._set(before)

    def _maybe(self, nodes: list[Node], why: str) -> None:
        """Run or not."""
        before = self.state.copy()
        self._block(nodes)
        self._set(join([before, self.state], why))

    def _passed_over(self, node: Node) -> bool:
        """Whether the parser left out more than spaces between the parts of a statement."""
        gaps = [(left.end_byte, right.start_byte) for left, right in itertools.pairwise(node.children)]
        gaps += [(node.children[-1].end_byte, node.end_byte)] if node.children else []
        return any(re.sub(rb"[ \t\n]|\\\n", b"", self._expand.source[start:end]) for start, end in gaps)

    def _run(self, node: Node) -> None:
        leaf = node.type in (
            "command",
            "variable_assignment",
            "variable_assignments",
            "declaration_command",
            "unset_command",
        )
        if time.monotonic() > self._until or self._depth > _DEEPEST or (leaf and node.descendant_count > _LONGEST):
            raise _Late
        direct = any(child.type == "ERROR" or child.is_missing for child in node.children) if node.has_error else False
        action: Callable[[Node], None] | None = getattr(self, f"_{node.type}", None)
        line = self._line
        self._line = self._first + node.start_point[0] + 1
        self._depth += 1
        if direct or (node.has_error and leaf) or action is None or self._passed_over(node):
            self._misread(self._line, self._expand.text(node))
        else:
            action(node)
        self._line = line
        self._depth -= 1

    def _program(self, node: Node) -> None:
        self._block(node.children)

    def _negated_command(self, node: Node) -> None:
        self._block(node.children)

    def _subshell(self, node: Node) -> None:
        self._aside(node.children)

    def _pipeline(self, node: Node) -> None:
        for child in node.children:
            self._aside([child])

    def _do_group(self, node: Node) -> None:
        self._block(node.children)

    def _list(self, node: Node) -> None:
        rest = []
        while node.type == "list":
            rest.append(node.children[-1])
            node = node.children[0]
        self._run(node)
        for child in reversed(rest):
            self._maybe([child], f"line {self._line}: it may not be run")

    def _compound_statement(self, node: Node) -> None:
        if node.children[0].type == "((":
            pieces = self._expand.quoted(node, node.start_byte + 2, node.end_byte - 2)
            self._compute(self._expand.joined(pieces))
        else:
            self._block(node.children)

    def _compute(self, text: str) -> None:
        from leangrpo_tools.plan import shellarith

        self._expand.arithmetic(text)
        for name in shellarith.assigned(text):
            self._put(name, self.state.variables.get(name, Unknown(f"line {self._line}")))

    def _test_command(self, node: Node) -> None:
        self._expand.quoted(node, node.start_byte, node.end_byte)

    def _redirected_statement(self, node: Node) -> None:
        body = node.child_by_field_name("body")
        texts, then = [], []
        for child in node.children:
            if child.type == "heredoc_redirect":
                texts += [self._heredoc(child)]
                then += [item for item in child.children if item.type in ("pipeline", "list", "command")]
            elif child.type == "herestring_redirect":
                texts += [self._expand.one(child.children[-1])]
        if body is None:
            return
        self._texts = texts
        self._run(body)
        for item in then:
            self._maybe([item], f"line {self._line}")
            for text in texts:
                if item.type == "pipeline" and item.named_children[-1].type == "command":
                    self._aside_text(item.named_children[-1], text)

    def _aside_text(self, node: Node, text: str) -> None:
        words = [self._expand.show(word) for word in self._words_of(node)]
        if words and words[0].rsplit("/", 1)[-1] in (*_SHELLS, *_REMOTE):
            self._inner(words, text, State(), len(words))

    def _heredoc(self, node: Node) -> str:
        start = next(self._expand.text(child) for child in node.children if child.type == "heredoc_start")
        body = next((child for child in node.children if child.type == "heredoc_body"), None)
        if body is None:
            return ""
        if re.search(r"['\"\\]", start):
            return self._expand.text(body)
        return self._expand.joined(self._expand.quoted(body, body.start_byte, body.end_byte, escaped="$`\\\\"))

    def _if_statement(self, node: Node) -> None:
        ways: list[State] = []
        why = f"line {self._line}: it differs between branches"
        clauses = [node, *(child for child in node.children if child.type in ("elif_clause", "else_clause"))]
        for clause in clauses:
            parts = [child for child in clause.children if child.type not in ("elif_clause", "else_clause")]
            cut = next((place for place, child in enumerate(parts) if child.type == "then"), None)
            if cut is not None:
                self._block(parts[:cut])
            missed = self.state.copy()
            self._block(parts[(cut or 0) + 1 :])
            ways.append(self.state)
            self._set(missed)
            if cut is None:
                break
        else:
            ways.append(self.state)
        self._set(join(ways, why))

    def _case_statement(self, node: Node) -> None:
        why = f"line {self._line}: it differs between branches"
        before, ways, every = self.state, [], False
        self._expand.words([node.children[1]])
        falls = any(part.type in (";&", ";;&") for item in node.children for part in item.children)
        for item in (child for child in node.children if child.type == "case_item"):
            parts = item.children
            cut = next((place for place, part in enumerate(parts) if part.type == ")"), len(parts))
            every = every or any(self._expand.text(part) == "*" for part in parts[:cut])
            self._set(join([before, *ways], why) if falls else before.copy())
            self._block(parts[cut + 1 :])
            ways.append(self.state)
        self._set(join(ways if every and not falls else [*ways, before], why))

    def _loop(self, once: Callable[[], None], why: str, start: State | None = None) -> None:
        """Run until nothing changes; what does change is unknown."""
        commands, self.reading.commands = self.reading.commands, []
        for turn in range(6):
            before = self.state.copy()
            self._turn(once, why)
            after = join([before, self.state], why)
            changed = [name for name, value in after.variables.items() if before.variables.get(name) != value]
            if turn and changed:
                after.variables.update({name: Unknown(why) for name in changed})
            self._set(after)
            if not changed:
                break
        else:
            self.state.lose(why)
        self.reading.reasons.update({name: value.why for name, value in self.state.variables.items()
                                     if isinstance(value, Unknown)})  # fmt: skip
        self.reading.commands = commands
        before = self.state.copy()
        self._turn(once, why)
        self._set(join([before, self.state], why))

    def _turn(self, once: Callable[[], None], why: str) -> int:
        self._escapes.append([])
        once()
        left = self._escapes.pop()
        self._set(join([self.state, *left], why) if left else self.state)
        return len(left)

    def _while_statement(self, node: Node) -> None:
        self._loop(lambda: self._block(node.children), f"line {self._line}: it changes in a loop")

    def _c_style_for_statement(self, node: Node) -> None:
        why = f"line {self._line}: it changes in a loop"
        from leangrpo_tools.plan import shellarith

        body = [child for child in node.children if child.type in ("do_group", "compound_statement")]
        names = shellarith.assigned(self._expand.text(node).split("))")[0])

        def once() -> None:
            for name in names:
                self._put(name, Unknown(why))
            self._block(body)

        self._loop(once, why)

    def _for_statement(self, node: Node) -> None:
        why = f"line {self._line}: it changes in a loop"
        name = self._expand.text(node.children[1])
        body = [child for child in node.children if child.type in ("do_group", "compound_statement")]
        start = next((place for place, child in enumerate(node.children) if child.type == "in"), None)
        given = [] if start is None else [c for c in node.children[start + 1 :] if c.is_named and c not in body]
        items = self._expand.words(given) if start is not None else None
        exact = (
            items is not None and len(items) <= _UNROLLED and all(map(known, items)) and node.children[0].type == "for"
        )
        before = self.state.copy()
        commands, self.reading.commands = self.reading.commands, []
        escaped = 0
        for item in items or [] if exact else []:
            self._put(name, item)
            escaped += self._turn(lambda: self._block(body), why)
            if escaped or self.state.dead:
                break
        once_only = exact and not escaped and len(items or []) == 1
        self.reading.commands = commands + self.reading.commands if once_only else commands
        if once_only or (exact and not items):
            return
        after = self.state

        def once() -> None:
            self._put(name, Unknown(why, tuple(items) if items and all(map(known, items)) and len(items) < 7 else ()))
            self.reading.reasons[name] = why
            self._block(body)

        self._set(before)
        self._loop(once, why)
        if exact and not escaped:
            self._set(after)

    def _function_definition(self, node: Node) -> None:
        name = self._expand.text(node.child_by_field_name("name") or node.children[0])
        body = node.child_by_field_name("body") or node.children[-1]
        self._functions[name] = (self._expand.source, body)
        self.state.functions[name] = (name,)

    def _call(self, name: str, words: list[str], given: dict[str, str]) -> None:
        self._called.add(name)
        source, body = self._functions[name]
        before, arguments, outer = self._expand.source, self.state.arguments, dict(self.state.variables)
        self.state.arguments = tuple(words[1:])
        for variable, value in given.items():
            self.state.variables[variable] = value
        self._expand.source = source
        self._escapes.append([])
        self._run(body)
        left = self._escapes.pop()
        self._set(join([self.state, *left], f"line {self._line}") if left else self.state)
        self._expand.source, self.state.arguments = before, arguments
        local = re.findall(
            r"\b(?:local|declare|typeset)\b([^;&|\n]*)", source[body.start_byte : body.end_byte].decode()
        )
        for variable in {*given, *(name for text in local for name in re.findall(r"\b([A-Za-z_]\w*)", text))}:
            self.state.variables.pop(variable, None)
            self.state.variables.update({variable: outer[variable]} if variable in outer else {})

    # assignments

    def _variable_assignments(self, node: Node) -> None:
        for child in node.named_children:
            self._variable_assignment(child)

    def _assignment(self, node: Node) -> tuple[str, Value, str | None]:
        """Name, value and index of one assignment."""
        target, sign, *value = node.children
        text, index = self._expand.text(target), None
        if target.type == "subscript":
            text, _, index = text.partition("[")
            index = index.rstrip("]")
        if value and value[0].type == "array":
            new: Value = tuple(self._expand.words(value[0].named_children))
            if re.search(r"(?:^|[\s(])\[[^\]]*\]=", self._expand.text(value[0])) or self._has_comment(value[0]):
                new = Unknown(f"line {self._line}: an array with places of its own")
        else:
            new = self._expand.one(value[0]) if value else ""
        if self._expand.text(sign) == "+=":
            new = self._added(self.state.variables.get(text), new, index)
        return text, new, index

    def _has_comment(self, node: Node) -> bool:
        return any(child.type == "comment" for child in node.children)

    def _added(self, old: Value | None, new: Value, index: str | None) -> Value:
        if index is not None or old is None or isinstance(new, Unknown):
            return Unknown(f"line {self._line}: it is added to")
        if isinstance(old, Unknown):
            return Unknown(old.why, tuple(self._added(item, new, None) for item in old.alternatives))  # type: ignore
        if isinstance(old, Unset):
            return new
        if isinstance(new, tuple):
            return (*((old,) if isinstance(old, str) else old), *new)
        return old + new if isinstance(old, str) else (*(old[0] + new,), *old[1:]) if old else (new,)  # type: ignore

    def _variable_assignment(self, node: Node) -> None:
        self._put(*self._assignment(node))

    def _declaration_command(self, node: Node) -> None:
        kind = self._expand.text(node.children[0])
        options = ""
        for child in node.children[1:]:
            if child.type == "variable_assignment":
                name, value, index = self._assignment(child)
            else:
                words = self._expand.words([child]) if child.type != "variable_name" else [self._expand.text(child)]
                if len(words) == 1 and words[0][:1] in "-+":
                    options += words[0]
                    continue
                match = _ASSIGNMENT.fullmatch(words[0]) if len(words) == 1 else None
                if match and not match[2]:
                    name, value, index = match[1], match[3], None
                elif len(words) == 1 and known(words[0]):
                    name, value, index = words[0], self.state.variables.get(words[0]), None
                    value = Unset() if value is None and kind == "local" else value
                else:
                    self.state.lose(f"line {self._line}: {kind} of names that are not known")
                    continue
            if kind == "export" or "x" in options:
                self.state.exported.add(name) if "n" not in options else self.state.exported.discard(name)
            if re.search(r"[Ainlu]", options) and kind != "export":
                value = Unknown(f"line {self._line}: {kind} {options}")
            if value is not None and "f" not in options:
                self._put(name, value, index)

    def _unset_command(self, node: Node) -> None:
        for word in self._expand.words(node.named_children):
            name = word.partition("[")[0]
            if not known(word):
                self.state.lose(f"line {self._line}: unset")
            elif not word.startswith("-"):
                self._put(name, Unset() if name == word else Unknown(f"line {self._line}: unset {word}"))

    # commands

    def _words_of(self, node: Node) -> list[str]:
        parts = [child for child in node.children if child.type not in ("variable_assignment", "herestring_redirect")]
        return self._expand.words([child for child in parts if not child.type.endswith("redirect")])

    def _command(self, node: Node) -> None:
        texts = [*self._texts, *(self._expand.one(child.children[-1]) for child in node.children
                                   if child.type == "herestring_redirect")]  # fmt: skip
        self._texts = []
        pairs = itertools.pairwise(node.children)
        if any(left.type == "variable_assignment" and left.end_byte == right.start_byte for left, right in pairs):
            self._misread(self._line, self._expand.text(node))
            return
        given: dict[str, str] = {}
        for child in node.children:
            if child.type == "variable_assignment":
                name, value, _ = self._assignment(child)
                given[name] = value if isinstance(value, str) else self._expand.hole(f"${name}")
        raw = self._words_of(node)
        if not raw:
            for name, value in given.items():
                self._put(name, value)
            return
        if raw[0] in self.state.functions:
            self._call(raw[0], raw, given)
            return
        words = [self._expand.show(word) for word in raw]
        exports = {name: self.state.variables.get(name, "") for name in self.state.exported} | given
        told = {name: self._expand.show(value) for name, value in exports.items() if isinstance(value, str)}
        self.reading.commands.append(Command(self._first + node.start_point[0] + 1, words, exports=told))
        self._strings(raw, words, exports, texts)
        self._builtin(raw, node)

    def _strings(self, raw: list[str], words: list[str], exports: dict, texts: list[str]) -> None:
        """Commands in strings for another shell."""
        names = [word.rsplit("/", 1)[-1] for word in words]
        passing = all(name in _PASSING or "=" in name or name.startswith("-") or name.isdigit() for name in names[:1])
        for place, name in enumerate(names):
            if name in _SHELLS:
                rest = raw[place + 1 :]
                at = next(
                    (i for i, word in enumerate(rest) if not word.startswith(("-", "+")) or "\x00" in word), len(rest)
                )
                kept = {k: v for k, v in exports.items() if place == 0 or passing}
                inner = State({**kept}, set(kept), None if "\x00" in "".join(rest[at + 1 :]) else tuple(rest[at + 2 :]))
                if any(re.fullmatch(r"-\w*c\w*", word) for word in rest[:at]) and at < len(rest):
                    self._inner(words[:place], rest[at], inner, at)
                elif at == len(rest):
                    for text in texts:
                        self._inner(words[:place], text, inner, at)
                return
            if name in _REMOTE:
                for text in [*(word for word in raw[place + 1 :] if re.search(r"\s", word)), *texts]:
                    self._inner(words[: place + 1], text, State(), 0)
                return
            if name == "sbatch":
                wraps = [word[7:] for word in raw if word.startswith("--wrap=")]
                wraps += [after for word, after in itertools.pairwise(raw) if word == "--wrap"]
                for text in [*wraps, *texts]:
                    self._inner([], text, State(dict(exports), set(exports)), 0)
                return

    def _inner(self, outer: list[str], text: str, state: State, _: int) -> None:
        reading = Reading(defaults=self.reading.defaults, reasons=self.reading.reasons)
        state.variables = {name: value for name, value in state.variables.items() if not isinstance(value, tuple)}
        reader = _Reader(reading, state, self._holes, self._until, self._depth + 5)
        reader.text_of(HOLE.sub(r"${LEANGRPO_HOLE_\1}", text))
        self.reading.notes += [f"line {self._line}, in a string: {note}" for note in reading.notes]
        self.reading.commands += [
            Command(self._line, item.words, [*outer, *item.outer], item.exports) for item in reading.commands
        ]

    def _builtin(self, words: list[str], node: Node) -> None:
        name, line = words[0], f"line {self._line}"
        if name in ("exit", "exec", "return", "break", "continue"):
            if name != "exec" or len(words) > 1:
                if name in ("return", "break", "continue") and self._escapes:
                    for escapes in self._escapes if name != "return" else self._escapes[-1:]:
                        escapes.append(self.state.copy())
                self.state.dead = (name != "break" and name != "continue") or bool(self._escapes)
        elif name in _READS:
            names = [word for word in words[1:] if re.fullmatch(r"[A-Za-z_]\w*", word)]
            if name == "printf":
                names = names[:1] if "-v" in words[1:2] else []
            elif name == "wait":
                names = []
            elif not all(map(known, words)):
                self.state.lose(f"{line}: {name}")
            for variable in names or (["REPLY"] if name == "read" else ["MAPFILE"] if "file" in name else []):
                self._put(variable, Unknown(f"{line}: {name}"))
        elif name == "let":
            for child in node.children[1:]:
                self._compute(self._expand.one(child))
        elif name == "set" and "--" in words:
            self.state.arguments = tuple(words[words.index("--") + 1 :])
        elif name == "set" and len(words) > 1 and not re.match(r"[-+]\w", words[1]):
            self.state.arguments = tuple(words[1:]) if known(words[1]) else Unknown(line)
        elif name == "shift":
            count = int(words[1]) if len(words) == 2 and words[1].isdigit() else 1
            given = self.state.arguments
            if isinstance(given, tuple):
                sure = len(words) < 3 and not any(map(self._expand.is_many, given)) and all(map(known, words))
                self.state.arguments = given[count if count <= len(given) else 0 :] if sure else Unknown(line)
        elif name in ("source", "."):
            if len(words) < 2 or words[1].rsplit("/", 1)[-1] not in ("activate", "conda.sh"):
                self.state.lose(f"{line}: {name} {self._expand.show(words[1]) if len(words) > 1 else ''} may set it")
        elif name == "eval":
            if all(map(known, words)):
                self.text_of(" ".join(words[1:]))
            elif "hook" not in self._expand.text(node):
                self.state.lose(f"{line}: eval of what is not known")
