"""What bash starts with a script, beside what is read of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from leangrpo_tools.plan import shell

BASH = shutil.which("bash")


def started(folder: Path, scripts: list[str]) -> list[list[list[str]] | None]:
    """What bash starts with each script; None where bash complains."""
    (folder / "run").mkdir()
    (folder / "fake").write_text("torchrun() { printf '%s\\0' TORCHRUN \"$@\" >&3; }\n")
    for place, script in enumerate(scripts):
        (folder / f"{place}.sh").write_text(script, encoding="utf-8")
    loop = f"cd {folder}/run; for i in $(seq 0 {len(scripts) - 1}); do "
    loop += f"timeout 5 {BASH} ../$i.sh 3>../$i.out 2>../$i.err; done; true"
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "BASH_ENV": f"{folder}/fake"}
    subprocess.run([str(BASH), "--norc", "-c", loop], env=env, check=True, stdin=subprocess.DEVNULL)
    found: list[list[list[str]] | None] = []
    for place in range(len(scripts)):
        fields = (folder / f"{place}.out").read_text(encoding="utf-8").split("\0")[:-1]
        calls: list[list[str]] = []
        for item in fields:
            calls.append([]) if item == "TORCHRUN" else calls[-1].append(item)
        found.append(None if (folder / f"{place}.err").read_text() else calls)
    return found


def fits(words: list[str], real: list[str]) -> bool:
    """Whether a command as it is read allows for the one that bash started."""
    if not words:
        return not real
    word = words[0]
    if isinstance(word, shell.Hidden) and word.many:
        return any(fits(words[1:], real[skip:]) for skip in range(len(real) + 1))
    if not real:
        return False
    pattern = ".*".join(re.escape(part) for part in re.split(r"\$.*", word, flags=re.S))
    known = re.fullmatch(pattern if "$" in word else re.escape(word), real[0], re.S)
    more = range(1, len(real) + 1) if "$" in word else [1]  # a value that is not known may be split
    return bool(known) and any(fits(words[1:], real[skip:]) for skip in more)


def read(script: str) -> tuple[list[list[str]], bool]:
    """The commands, and whether the reader says that some were not understood."""
    reading = shell.read(script)
    commands = [command.words[1:] for command in reading.commands if command.words[0] == "torchrun"]
    return commands, any("not understood" in note or "not all" in note for note in reading.notes)
