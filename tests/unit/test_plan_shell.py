"""Launch files read as text: commands, continuation, variables; nothing is run."""

from __future__ import annotations

import pytest

from leangrpo_tools.plan import shell
from leangrpo_tools.plan.shell import arithmetic


def words(text: str) -> list[list[str]]:
    return [command.words for command in shell.read(text).commands]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b\nc", [["a", "b"], ["c"]]),
        ("a \\\n  b \\\n  c", [["a", "b", "c"]]),
        ("a b \\", [["a", "b"]]),
        ("a b \\\n", [["a", "b"]]),
        ("a b\\\\\nc", [["a", "b\\"], ["c"]]),
        ("a \\\r\n b\r\n", [["a", "b"]]),
        ("\ufeffa b", [["a", "b"]]),
        ("# a b\nc # d", [["c"]]),
        ("a b#c", [["a", "b#c"]]),
        ("a '# b' \"# c\"", [["a", "# b", "# c"]]),
        ("a && b; c | d &", [["a"], ["b"], ["c"], ["d"]]),
        ("a 'b\nc' d", [["a", "b\nc", "d"]]),
        ("it's open\na b", [["a", "b"]]),
        ("cat <<EOF > x\ntorchrun no.py\nEOF\na", [["cat"], ["a"]]),
        ("a --b=$(nvidia-smi -L | wc -l) c", [["a", f"--b={shell.OUTPUT}", "c"]]),
        ("a `b c` d", [["a", shell.OUTPUT, "d"]]),
        ("ssh h 'a b; c'", [["ssh", "h", "a b; c"], ["a", "b"], ["c"]]),
        ("run 'a b; c'", [["run", "a b; c"]]),
    ],
)
def test_commands(text: str, expected: list[list[str]]) -> None:
    assert words(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("N=8\nrun $N ${N}x", ["run", "8", "8x"]),
        ("export N=8 M=2\nrun $N $M", ["run", "8", "2"]),
        ('N="${N:-4}"\nrun "$N"', ["run", "4"]),
        ("run ${N:-4} ${M-5}", ["run", "4", "5"]),
        ("N=8 run $M", ["run", "$M"]),
        ("N=1\nN=2\nrun $N", ["run", "2"]),
        ("if c; then N=1; else N=2; fi\nrun $N", ["run", "$N"]),
        ("N=$M\nrun $N", ["run", "$N"]),
        ("N=$(hostname)\nrun $N", ["run", "$N"]),
        ('set -- a $X; run "$*,b" c"$@"', ["run", "$*,b", "ca$X"]),
        ("if c; then f() { N=1; }; else f() { N=2; }; fi; f; run $N", ["run", "$N"]),
        ("f() { for i in 1 2; do N=4; return; done; N=8; }; f; run $N", ["run", "$N"]),
        ("declare -i N=1\nN=2+3\nrun $N", ["run", "$N"]),
        ("IFS=,\nN=1,2\nrun $N", ["run", "$1,2"]),
        ("export N=8\nenv -i bash -c 'run ${N:-4}'", ["run", "${N:-4}"]),
        ("env N=8 bash -c 'run ${N:-4}'", ["run", "8"]),
        ("A=(1 # one\n 2)\nrun ${A[@]}", ["run", "1", "2"]),
        ("N=8\nexport M\nbash -c 'run ${M:-4}'", ["run", "4"]),
    ],
)
def test_variables(text: str, expected: list[str]) -> None:
    assert words(text)[-1] == expected


def test_a_command_for_other_machines() -> None:
    """This file's variables are replaced, those of the other shell are not; inner quotes end the outer ones."""
    text = 'N=4\nR=1\npdsh -w ^hosts "cd x ; \n export U="http://u" ; \n torchrun --n $N --r \\$R a.py \\\n --b 2 "\n'
    found = shell.read(text + '# --c "\n').commands
    assert [(command.line, command.words) for command in found[1:]] == [
        (3, ["cd", "x"]), (3, ["torchrun", "--n", "4", "--r", "$R", "a.py", "--b", "2"])
    ]  # fmt: skip


def test_notes_and_lines() -> None:
    reading = shell.read("x\r\n\r\ny it's\r\nz\r\n")
    assert [(command.line, command.words) for command in reading.commands] == [(1, ["x"]), (4, ["z"])]
    assert any("Windows line ends" in note for note in reading.notes)
    assert any("line 3" in note for note in reading.notes)


def test_nothing_is_run(tmp_path) -> None:
    shell.read(f"touch {tmp_path}/made\necho `touch {tmp_path}/made` $(touch {tmp_path}/made)")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7 / -2", -3), ("-7 % 3", -1), ("2**3**2", 512), ("(-2)**2", 4), ("0x1F + 010", 39), ("1 << 3", 8),
        ("N*(M-1)", 20), ("", 0), ("-2**2", None), ("16#ff", None), ("~5", None), ("09", None), ("1/0", None),
        ("2**63", None), ("6//2", None), ("1 < 2", None), ("N=3", None), ("2.5", None), ("X", None),
    ],
)  # fmt: skip
def test_arithmetic(text: str, number: int | None) -> None:
    """As bash computes, or not known."""
    assert arithmetic.evaluate(text, {"N": "5", "M": "N"}.get) == number
