"""Launch files whose values depend on rare rules of bash: each is read as bash runs it, or is not known."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.bash import BASH, fits, read, started

from leangrpo_tools.plan import shell

needs_bash = pytest.mark.skipif(BASH is None, reason="there is no bash to compare with")
PLAIN = {
    "two assignments in a line": "A=1 N=4\ntorchrun $N $A\n",
    "two assignments before a block": "N=8; A=2; if true; then\nN=4 A=6\n{ torchrun ${A:-1} $N; }\nfi\n",
    "lines of assignments": "A=1 N=4\nx=3\nB=2 C=$N\n{ torchrun $N$C $x; }\n",
    "a comment between": "A=1 N=4  # ranks\n\n# more\ntorchrun $N\n",
    "a continued prefix": "N=8\nA=1 N=4 \\\n  torchrun $N\n",
    "a local beside others": 'N=8\nf() {\nlocal r="${1:-$N}"\nN=$r\n}\nf 4\ntorchrun $N\n',
    "local in a comment": "N=8\nf() {\n# the local N\necho local N >/dev/null\nN=4\n}\nf\ntorchrun $N\n",
    "a local without a value": "A=5\nf() {\nlocal A; B=${A}z\n}\nf\ntorchrun $A $B\n",
    "declare -g": "N=8\nf() { declare -g N=4; }\nf\ntorchrun $N\n",
    "arguments after a call": 'f() { :; }\nf 1 2\nset -- 7\nf 3\ntorchrun "$1"\n',
    "first of more arguments": 'f() { torchrun $1 "$@"; }\nset -- a\nf 4 "$@"\n',
    "comments in an array": 'L=(\n  --a 2   # prompts ( \'\n  # --b\n  --c\n)\ntorchrun "${L[@]}"\n',
    "a chain": "cd . && N=4 && torchrun $N\n",
    "an alternative": "true && N=4 && M=$N || exit\ntorchrun --end\n",
    "builtin": "N=8\nbuiltin export N=4\ntorchrun $N\n",
    "a prefix of an inner shell": "export N=8\nenv N=4 bash -c 'torchrun $N'\n",
    "an empty array": 'P=()\n"${P[@]}" torchrun 4\n',
}


@needs_bash
@pytest.mark.parametrize("name", PLAIN)
def test_what_is_plain_is_known(name: str, tmp_path: Path) -> None:
    calls = started(tmp_path, [PLAIN[name]])[0]
    said, lost = read(PLAIN[name])
    assert calls and not lost
    assert calls == said


RARE = {
    "IFS": "IFS=,\nL=(1,2)\nV=1,2\ntorchrun $V\n",
    "a local that is only in one branch": "N=8\nf() {\nif true; then local N; fi\nN=4\n}\nf\ntorchrun $N\n",
    "a nameref": "N=8\nf() { local -n out=$1; out=4; }\nf N\ntorchrun $N\n",
    "env -u": "export N=8\nenv -u N bash -c 'torchrun ${N:-4}'\n",
    "an inner shell of a program": "export N=4\nnice -n 1 env M=3 xargs -a /dev/null bash -c 'torchrun ${N:-8}'\n",
    "allexport": "set -a\nN=4\nset +a\nbash -c 'torchrun ${N:-8}'\n",
    "export in one branch": "N=4\nif [ -n \"$Q\" ]; then export N; fi\nbash -c 'torchrun ${N:-8}'\n",
    "a hook of the file": 'N=8\nhook() { echo N=4; }\neval "$(hook)"\ntorchrun $N\n',
    "an activate that sets it": "N=8\necho N=4 > activate.sh\nbuiltin source ./activate.sh\ntorchrun $N\n",
    "bodies in branches": "N=4\nif [ $N -gt 1 ]; then f() { torchrun 4; }; else f() { torchrun 8; }; fi\nf\n",
    "time of a function": "f() { torchrun ${1:-8}; }\ntime f 4 2>/dev/null\n",
    "a function in a substitution": "f() { torchrun ${1:-8}; }\nx=$(f 4)\n",
    "a function in an inner shell": "f() { torchrun ${1:-8}; }\nexport -f f torchrun\nbash -c 'f 4'\n",
}


@needs_bash
@pytest.mark.parametrize("name", RARE)
def test_what_is_rare_is_never_wrong(name: str, tmp_path: Path) -> None:
    (calls,) = started(tmp_path, [RARE[name]])
    said, lost = read(RARE[name])
    assert lost or all(any(fits(words, call) for words in said) for call in calls or []), (calls, said)
    wrong = [words for words in said if not any(fits(words, call) for call in calls or [])]
    assert not wrong or len(said) > len(wrong) or not calls, (calls, said)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("text", [False, True])
def test_optional_words_hide_only_themselves(count: int, text: bool) -> None:
    """Flags that are added under a condition: the others are known, and each addition is named."""
    begin, add, use = ('L="--a 2"', 'L="$L --x{0}"', "$L") if text else ("L=(--a 2)", "L+=(--x{0} {0})", '"${L[@]}"')
    lines = [begin, *(f'if [ "$Q{at}" ]; then {add.format(at)}; fi' for at in range(count)), f"torchrun {use} --end"]
    (command,) = [item for item in shell.read("\n".join(lines)).commands if item.words[0] == "torchrun"]
    assert command.words[1:3] == ["--a", "2"] and command.words[-1] == "--end"
    hidden = command.words[3:-1]
    assert len(hidden) == count and all(isinstance(word, shell.Hidden) and word.closed for word in hidden)
    for at, word in enumerate(hidden):
        added = (f"--x{at}",) if text else (f"--x{at}", str(at))
        assert isinstance(word, shell.Hidden) and set(word.alternatives) == {(), added}


@pytest.mark.parametrize(
    ("before", "value"), [("srun -N 2", "4"), ("srun --export=ALL,N=2", None), ("srun --export=NONE", None), 
                          ("env -i", None), ("conda run -n a", None), ("singularity exec i.sif", None), 
                          ("docker run -e N=2 i", None), ("mpirun -x N", None), ("sudo -E", None), ("nohup", "4"),
                          ("timeout 60", "4"), ("nice -n 10", "4"), ("env N=6", "6"), ("srun -l env A=1", "4")],
)  # fmt: skip
def test_the_environment_of_an_inner_shell(before: str, value: str | None) -> None:
    reading = shell.read(f"export N=4\n{before} bash -c 'torchrun ${{N:-8}}'\n")
    (found,) = [command.words[1] for command in reading.commands if command.words[0] == "torchrun"]
    assert found == value if value else "$" in found
    assert not reading.defaults or value is None
