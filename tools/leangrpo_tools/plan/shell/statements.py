"""Statements in order: both branches of an `if`, loops until nothing changes, functions where they are called."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from leangrpo_tools.plan.shell import arithmetic
from leangrpo_tools.plan.shell.commands import Commands
from leangrpo_tools.plan.shell.holes import Holes
from leangrpo_tools.plan.shell.reading import Reading
from leangrpo_tools.plan.shell.state import HOLE, State, Unknown, Value, known
from leangrpo_tools.plan.shell.tree import TooLong, Work, first_error, parse, understood
from leangrpo_tools.plan.shell.words import MARKS

if TYPE_CHECKING:
    from tree_sitter import Node

_DEEPEST = 40


def read(text: str, given: Mapping[str, str | None] | None = None) -> Reading:
    """Read the text of a launch file. `given`: variables of its environment; None: not known. Raises LG501."""
    reading = Reading()
    text = text.removeprefix("\ufeff").replace("\0", "")
    if "\r" in text:
        reading.notes.append("the launch file has Windows line ends: bash on Linux will not run it as it is")
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if MARKS.search(text) or HOLE.search(text):
        reading.notes.append("the launch file has characters that no text has: it was not read")
        return reading
    have: dict[str, Value] = {}
    for name, value in (given or {}).items():
        have[name] = Unknown("the environment's") if value is None else value
    reader = Statements(reading, State({**have, **{f"export {name}": "" for name in have}}), Holes(), Work(), [])
    reader._ever.update(have)
    try:
        reader.text_of(text)
        reader.uncalled()
    except (TooLong, RecursionError):
        reading.notes.append("the launch file is too long or too deeply nested: not all of it was read")
    return reading


class Statements(Commands):
    """Follows the statements of a text."""

    def text_of(self, text: str, first: int = 0) -> None:
        """Follow the statements; after one that is not understood, from the next line on."""
        text = text.rstrip()
        if (len(text) - len(text.rstrip("\\"))) % 2:
            text = text[:-1]
        before, lines = (self._words.source, self._first), text.split("\n")
        while lines:
            self._words.source, self._first = "\n".join(lines).encode(), first
            root, self._words.source = parse(self._words.source, self._work)
            row = first_error(root)
            whole = [node for node in root.children if row is None or node.end_point[0] < row]
            self._block(whole if root.type != "ERROR" else [])
            if row is None:
                break
            self._misread(self._fixed or first + row + 1, "\n".join(lines))
            lines, first = lines[row + 1 :], first + row + 1
        self._words.source, self._first = before

    def uncalled(self) -> None:
        """Functions that the file never calls by name: another program may."""
        for name, body in self._bodies.items():
            if name not in self._called:
                exported = {key: value for key, value in self.state.variables.items() if key.startswith("export ")}
                self.state.become(State({**self._ever, **exported, name: body}, self.state.lost))
                self._call([name.removesuffix("()"), self._holes.new("$@", many=True)], {})

    def _misread(self, line: int, text: str) -> None:
        self.reading.notes.append(f"line {line} was not understood and left out")
        self._doubt = f"line {line} was not understood"
        for name in dict.fromkeys(re.findall(r"([A-Za-z_]\w*)\+?=", text)):
            self._put(name, Unknown(self._doubt))
        self.state.lose(self._doubt)

    def _block(self, nodes: list[Node]) -> None:
        for place, node in enumerate(nodes):
            if self.state.dead:
                return
            background = place + 1 < len(nodes) and nodes[place + 1].type == "&"
            if node.is_named and node.type != "comment":
                self._aside([node]) if background else self._run(node)

    def _run(self, node: Node) -> None:
        self._work.spend(5 + node.descendant_count // 100)
        if self._depth > _DEEPEST:
            raise TooLong
        action: Callable[[Node], None] | None = getattr(self, f"_{node.type}", None)
        line, self._line = self._line, self._fixed or self._first + node.start_point[0] + 1
        self._depth += 1
        if action is None or not understood(node, self._words.source):
            self._misread(self._line, self._words.text(node))
        else:
            action(node)
        self._depth -= 1
        self._line = line

    def _in_order(self, node: Node) -> None:
        self._block(node.children)

    _negated_command = _do_group = _in_order

    def _aside(self, nodes: list[Node]) -> None:
        """In a shell of its own: nothing comes back."""
        before = self.state.copy()
        self._block(nodes)
        self.state.become(before)

    def _subshell(self, node: Node) -> None:
        self._aside(node.children)

    def _pipeline(self, node: Node) -> None:
        for child in node.children:
            self._aside([child])

    def _maybe(self, nodes: list[Node]) -> None:
        """Run or not."""
        before = self.state.copy()
        self._block(nodes)
        self.state.become(self._join([before, self.state], f"line {self._line}: it may not be run"))

    def _list(self, node: Node) -> None:
        """`A && B || C`: B is run where A succeeded, C where one of them failed."""
        why, rest = f"line {self._line}: it may not be run", []
        while node.type == "list":
            rest.append(node.children[1:])
            node = node.children[0]
        self._run(node)
        missed: list[State] = []
        for sign, child in reversed(rest):
            if sign.type == "&&":
                missed.append(self.state.copy())
                self._block([child])
                continue
            done = self.state.copy()
            self.state.become(self._join([*missed, done], why))
            self._block([child])
            missed = []
            self.state.become(self._join([done, self.state], why))
        self.state.become(self._join([*missed, self.state], why))

    def _compound_statement(self, node: Node) -> None:
        if node.children[0].type == "((":
            self._compute(self._words.quoted(node, node.start_byte + 2, node.end_byte - 2))
        else:
            self._block(node.children)

    def _test_command(self, node: Node) -> None:
        self._words.quoted(node, node.start_byte, node.end_byte)  # for `${X:=Y}` in it

    def _redirected_statement(self, node: Node) -> None:
        before, then = self._texts, []
        for child in node.children:
            if child.type == "heredoc_redirect":
                self._texts = [*self._texts, self._heredoc(child)]
                then += [item for item in child.children if item.type in ("pipeline", "list", "command")]
            elif child.type == "herestring_redirect":
                self._texts = [*self._texts, self._words.one(child.children[-1])]
        body = node.child_by_field_name("body")
        if body is not None:
            self._run(body)
        for item in then:
            self._maybe([item])
        self._texts = before

    def _heredoc(self, node: Node) -> str:
        parts = {child.type: child for child in node.children}
        body = parts.get("heredoc_body")
        if body is None:
            return ""
        literal = re.search(r"['\"\\]", self._words.text(parts["heredoc_start"]))
        return self._words.text(body) if literal else self._words.quoted(body, body.start_byte, body.end_byte)

    def _if_statement(self, node: Node) -> None:
        ways: list[State] = []
        for clause in [node, *(child for child in node.children if child.type in ("elif_clause", "else_clause"))]:
            parts = [child for child in clause.children if child.type not in ("elif_clause", "else_clause")]
            cut = next((place for place, child in enumerate(parts) if child.type in ("then", "else")), 0)
            self._block(parts[:cut])
            missed = self.state.copy()
            self._block(parts[cut + 1 :])
            ways.append(self.state.copy())
            if clause.type == "else_clause":
                break
            self.state.become(missed)
        else:
            ways.append(self.state.copy())
        self.state.become(self._join(ways, f"line {self._line}: it differs between branches"))

    def _case_statement(self, node: Node) -> None:
        """Any of the branches, or none: patterns are not compared."""
        why = f"line {self._line}: it differs between branches"
        self._words.all([node.children[1]])
        ways = [self.state.copy()]
        falls = any(part.type in (";&", ";;&") for item in node.children for part in item.children)
        every = False
        for item in (child for child in node.children if child.type == "case_item"):
            cut = next((place for place, part in enumerate(item.children) if part.type == ")"), len(item.children))
            every = every or any(self._words.text(part) == "*" for part in item.children[:cut])
            self.state.become(self._join(ways if falls else ways[:1], why))
            self._block(item.children[cut + 1 :])
            ways.append(self.state.copy())
        self.state.become(self._join(ways[1:] if every and not falls else ways, why))

    def _loop(self, once: Callable[[], None]) -> None:
        """Run until nothing changes; what does change is not known."""
        why = f"line {self._line}: it changes in a loop"
        commands = self.reading.commands
        for turn in range(6):
            before, self.reading.commands = self.state.copy(), []
            self._escapes.append([])
            once()
            after = self._join([before, self.state, *self._escapes.pop()], why)
            changed = [name for name, value in after.variables.items() if before.variables.get(name) != value]
            if turn:
                after.variables.update({name: Unknown(why) for name in changed})
            self.state.become(after)
            if not changed:
                break
        else:
            self.state.lose(why)
        self.reading.commands = commands + self.reading.commands

    def _while_statement(self, node: Node) -> None:
        self._loop(lambda: self._block(node.children))

    def _c_style_for_statement(self, node: Node) -> None:
        names = arithmetic.assigned(self._words.text(node).split("))")[0])
        self._for(node, names, Unknown(f"line {self._line}: it changes in a loop"))

    def _for(self, node: Node, names: list[str], value: Unknown) -> None:
        def once() -> None:
            for name in names:
                self._put(name, value)
            self._block([child for child in node.children if child.type in ("do_group", "compound_statement")])

        self._loop(once)

    def _for_statement(self, node: Node) -> None:
        name, kinds = self._words.text(node.children[1]), [child.type for child in node.children]
        why, items = f"line {self._line}: it changes in a loop", ()
        if "in" in kinds:
            given = [child for child in node.children[kinds.index("in") + 1 :] if child.is_named]
            items = self._words.all([child for child in given if child.type not in ("do_group", "compound_statement")])
        exact = "in" in kinds and all(map(known, items))
        if not exact or items:
            self._for(node, [name], Unknown(why, tuple(items) if exact and len(items) < 7 else (None,)))

    def _function_definition(self, node: Node) -> None:
        name = self._words.text(node.child_by_field_name("name") or node.children[0])
        body = node.child_by_field_name("body") or node.children[-1]
        self._bodies[f"{name}()"] = (self._words.text(body), str(self._first + body.start_point[0]))
        self._put(f"{name}()", self._bodies[f"{name}()"])
