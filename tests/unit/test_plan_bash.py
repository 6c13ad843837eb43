"""Launch files beside bash itself: a command is read as bash would start it, or its words are said to be unknown."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.bash import BASH, fits, read, started

pytestmark = pytest.mark.skipif(BASH is None, reason="there is no bash to compare with")
NAMES, ARRAYS = ("N", "MORE", "ARGS", "G_2", "x"), ("L", "OPTS")


class Grammar:
    """Scripts that depend on nothing outside, at random."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.depth = 0

    def one(self, *options: str) -> str:
        return self.dice.choice(options)

    def bare(self) -> str:
        return self.one(
            "8", "16", "a", "--n=4", "--b", "x.py", "d/e.py", "07", "k=v", "a:b", "-2", "%", "a,b", "@", "+", "#a"
        )

    def text(self) -> str:
        return self.one(
            "",
            " ",
            "a b",
            "  --n  4 ",
            "x\ty",
            "1 2 3",
            "8",
            "a'b",
            "*",
            "#",
            "d/e f.py",
            "a\\\\b",
            "é",
            "{a,b}",
            "~/x",
        )

    def pattern(self) -> str:
        return self.one(
            "%.py", "%%.*", "##*/", "#*/", "%/*", "/a/b", "//a/Z", ":1:2", ":1", "^^", ",,", "%8", "#--", "/a", "%%?"
        )

    def arithmetic(self) -> str:
        self.depth += 1
        kind = self.dice.randrange(12) if self.depth < 4 else self.dice.randrange(4)
        a, b = (self.arithmetic(), self.arithmetic()) if kind > 3 else ("", "")
        self.depth -= 1
        if kind < 4:
            return self.one("2", "8", "0x1F", "010", "3", "1", "N", "$x", "${N}", "G_2", "16#ff", "100")
        if kind < 9:
            sign = self.one("+", "-", "*", "/", "%", "<<", "&", "|", "^", "<", ">=", "==", "&&", "||", "**")
            return f"{a}{self.one('', ' ')}{sign} {b}"
        return {
            9: f"({a} {self.one('+', '*', '-')} {b})",
            10: f"{self.one('-', '!', '~', '+')} {a}",
            11: f"{a} ? {b} : {a}",
        }[kind]

    def operand(self) -> str:
        return self.one("", "8", "a b", "--n 4", "$N", "${MORE:-9}", "x.py", '"q r"', "$((2*3))", "${x}/y")

    def variable(self) -> str:
        name, array = self.one(*NAMES), self.one(*ARRAYS)
        return self.one(
            f"${name}",
            f"${{{name}}}",
            f"${{{name}:-{self.operand()}}}",
            f"${{{name}-{self.operand()}}}",
            f"${{{name}:+{self.operand()}}}",
            f"${{{name}+{self.operand()}}}",
            f"${{{name}:={self.operand()}}}",
            f"${{{name}{self.pattern()}}}",
            f"${{#{name}}}",
            f"${{#{array}[@]}}",
            f"${{{array}[{self.one('0', '1', '-1', 'N')}]}}",
            f"${{{array}[@]}}",
            f"${{{array}[*]}}",
            f"${array}",
            f"$(({self.arithmetic()}))",
            "$1",
            "$2",
            "$#",
            "$@",
            "$*",
            "${1:-4}",
        )

    def part(self) -> str:
        kind = self.dice.randrange(10)
        if kind < 3:
            return self.bare()
        if kind < 5:
            return self.variable()
        if kind < 8:
            inner = "".join(self.one(self.text(), self.variable(), self.bare()) for _ in range(self.dice.randrange(4)))
            return f'"{inner}"'
        return self.one(
            f"'{self.text().replace(chr(39), '')}'", "x\\ y", "\\$N", "a\\b", "$'a\\tb'", '"\\$x"', "\\\\", "''"
        )

    def word(self) -> str:
        return "".join(self.part() for _ in range(self.one(*"1112").__len__() and int(self.one(*"1112"))))

    def words(self, most: int = 4) -> str:
        gap = self.one(" ", " ", "  ", " \\\n  ")
        return gap.join(self.word() for _ in range(self.dice.randrange(most)))

    def run(self) -> str:
        before, after = self.one("", "", "N=3 ", "exec_=1 "), self.one("", " # no", " > /dev/null", " 2>&1")
        return f"{before}torchrun {self.words()} --end{after}"

    def statement(self) -> str:
        name, array = self.one(*NAMES), self.one(*ARRAYS)
        self.depth += 1
        kind = self.dice.randrange(46 if self.depth < 4 else 18)
        made = self._simple(kind, name, array) if kind < 18 else self._compound(kind, name)
        self.depth -= 1
        return made

    def _simple(self, kind: int, name: str, array: str) -> str:
        return [
            lambda: f"{name}={self.word()}",
            lambda: f"{name}={self.word()}",
            lambda: f"{name}={self.bare()}",
            lambda: f"{name}+={self.word()}",
            lambda: f"export {name}={self.bare()}",
            lambda: f'export {name}="{self.text()}"',
            lambda: f"{array}=({self.words()})",
            lambda: f"{array}=({self.words()})",
            lambda: f"{array}+=({self.words()})",
            lambda: f"{array}[{self.one('0', '1', 'N')}]={self.word()}",
            lambda: f"let {name}={self.one('2', '3*4', 'N+1')}",
            lambda: f"(({name}{self.one('=', '+=', '*=', '-=')}{self.arithmetic()}))",
            lambda: f"(({name}{self.one('++', '--')}))",
            lambda: f"set -- {self.words()}",
            lambda: f"unset {name}",
            lambda: f": {self.variable()}",
            lambda: "shift",
            lambda: f"# {name}=7 'torchrun",
        ][kind]()

    def block(self) -> str:
        return "\n".join(self.statement() for _ in range(1 + self.dice.randrange(2)))

    def _compound(self, kind: int, name: str) -> str:
        inner = self.block()
        test = self.one("true", "false", f'[ -z "${name}" ]', f"[[ -n ${name} ]]", "(( N > 3 ))")
        return [
            lambda: self.run(),
            lambda: self.run(),
            lambda: self.run(),
            lambda: self.run(),
            lambda: f"if {test}; then\n{inner}\nelif false; then\n{self.block()}\nelse\n{self.block()}\nfi",
            lambda: f"if {test}; then\n{inner}\nfi",
            lambda: f"{test} && {{ {inner}\n}}",
            lambda: f"{test} || {name}={self.word()}",
            lambda: f"case ${name} in 8|16) {inner}\n;; *) {self.block()}\n;; esac",
            lambda: f"( {inner}\n)",
            lambda: f"for {name} in {self.word()} {self.words()}; do\n{inner}\ndone",
            lambda: f"for {name} in {self.one('$@', '${L[@]}', '${OPTS[@]}')}; do {inner}\ndone",
            lambda: f"while false; do {inner}\ndone",
            lambda: f"f() {{ local x=1\n{inner}\n}}\nf {self.words()}",
            lambda: f"cat <<E >/dev/null\n{name}=3 $N 'q\nE\n{inner}",
            lambda: f"{{ {inner}\n}} | cat >/dev/null",
            lambda: f"{name}={self.bare()} {self.one(*NAMES)}={self.word()}{self.one('', ' # no')}\n{inner}",
            lambda: f"{name}={self.bare()} {self.one(*NAMES)}={self.word()}\n{{ {inner}\n}}",
            lambda: f"f() {{\nlocal {name}={self.word()}\n{inner}\n}}\n{self.one('', 'time ')}f {self.words()}",
            lambda: f"f() {{\n{self.one('true', 'false')} && local {name}\n{inner}\n}}\nf {self.words()}",
            lambda: f"IFS={self.one(',', ':', '/')}\n{inner}",
            lambda: f"g() {{ local -n out=$1; out={self.bare()}; }}\ng {name}\n{inner}",
            lambda: f"if {test}; then h() {{ {inner}\n}}\nelse h() {{ {self.block()}\n}}\nfi\nh {self.words()}",
            lambda: f"L=({self.words()} # no ' (\n{self.words()}\n# no\n)\n{inner}",
            lambda: f"{test} && OPTS+=({self.words()})\n{test} && OPTS+=({self.words()})\n{inner}",
            lambda: f'if {test}; then {name}="${name} {self.bare()}"; fi\n{inner}',
            lambda: f"export {name}; {self.one('', 'N=5 ', 'env x=7 ', 'env -u N ')}{self.inner_shell()}",
            lambda: f"{self.one('builtin', 'command')} export {name}={self.bare()}\n{inner}",
        ][kind - 18]()

    def inner_shell(self) -> str:
        name = self.one(*NAMES)
        return f"{BASH} -c 'torchrun ${name} \"${{{self.one(*NAMES)}:-8}}\" --end' 2>&1"

    def script(self) -> str:
        return "\n".join([*(self.statement() for _ in range(2 + self.dice.randrange(6))), self.run()]) + "\n"


@pytest.mark.parametrize("part", range(3))
def test_what_is_read_is_what_bash_starts(part: int, tmp_path: Path) -> None:
    """Seeded scripts of assignments, quotes, arrays, arithmetic, defaults, branches, loops and functions."""
    scripts = [Grammar(1000 * part + seed).script() for seed in range(200)]
    seen = known = 0
    for script, calls in zip(scripts, started(tmp_path, scripts), strict=True):
        said, lost = read(script)
        for call in calls or []:
            assert lost or any(fits(words, call) for words in said), f"{script}\nbash: {call}\nread: {said}"
            seen += 1
            known += call in said
    assert seen > 200 and known > 0.4 * seen, (seen, known)
