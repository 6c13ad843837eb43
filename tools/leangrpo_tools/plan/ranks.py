"""How many ranks the words before a training script start. A number that is not written there is never assumed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from leangrpo_tools.errors import KitError
from leangrpo_tools.plan.flagvalues import LARGEST_NUMBER, not_read
from leangrpo_tools.plan.shell import Hidden

if TYPE_CHECKING:
    from leangrpo_tools.plan.launch import Training

_MODULES = {"torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun"}
_MODULES |= {"accelerate.commands.launch": "accelerate", "deepspeed.launcher.runner": "deepspeed"}
_NAMES = {"torchrun": "torchrun", "torchrun.sh": "", "accelerate": "accelerate", "accelerate-launch": "accelerate"}
_NAMES |= {"deepspeed": "deepspeed", "ds": "deepspeed", "srun": "srun"}
_NAMES |= dict.fromkeys(("mpirun", "mpiexec", "orterun", "mpirun.mpich", "mpiexec.hydra"), "mpirun")
_SEVERAL = {"srun", "mpirun", "deepspeed"}
_STARTERS = frozenset(
    ("pdsh", "clush", "parallel", "xargs", "aprun", "jsrun", "prun", "horovodrun", "ray", "colossalai")
)
"""Other programs that may start a command several times."""
_SWITCHES_TEXT = (
    "-m --module --standalone --no-python --no_python --run-path --run_path --use-env --use_env --multi_gpu "
    "--cpu --use_deepspeed --use_fsdp --same_network --debug -u --unbuffered -l --label --exclusive --overlap "
    "--oversubscribe --allow-run-as-root --pty --no_local_rank --force_multi -O -B -E -s -I"
)
SWITCHES = frozenset(_SWITCHES_TEXT.split())
"""Options of launchers that take no value."""
_NEUTRAL = frozenset(["exec", "env", "nohup", "time", "command", "setsid"])
_WRAPPERS = _NEUTRAL | frozenset(["nice", "ionice", "numactl", "taskset", "chrt", "timeout", "stdbuf", "xvfb-run"])
"""Programs that start one other program, once."""
_PAIRS = frozenset(["mca", "gmca", "genv", "env"])
"""MPI's options that take two values."""
_PYTHON = re.compile(r"python[\d.]*")
_RANK_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK")


def is_launcher(word: str) -> bool:
    """Whether a word starts several ranks."""
    return bool(_NAMES.get(word.rsplit("/", 1)[-1]) or _MODULES.get(word))


def has_launcher(words: list[str]) -> bool:
    """Whether one of the words does."""
    return any(map(is_launcher, words))


def may_start(words: list[str]) -> bool:
    """Whether words before a script may start it: a tool that only reads it, or compiles it, does not."""
    names = [word.rsplit("/", 1)[-1] for word in words]
    place = next((place for place, name in enumerate(names) if _PYTHON.fullmatch(name)), None)
    if has_launcher(words) or place is None or "-m" not in words[place:-1]:
        return has_launcher(words) or place is not None or not words or "$" in words[0] or "." in words[0]
    return False


def ranks(training: Training, declared: int | None = None) -> int:
    """World size, from the launcher's own words, else `declared`. Raises LG503 where neither tells."""
    words = training.before
    unknown = [word for place, word in enumerate(words) if _hides(words, place)]
    if unknown:
        what = f"{', '.join(dict.fromkeys(unknown))} before the script is not known: it may name the ranks"
        raise _not_known(what, not_read(" ".join(unknown), training.reasons))
    places = [place for place, word in enumerate(words) if is_launcher(word)]
    if not places:
        return _python(words, training.exports)
    kind = _kind(words[places[-1]])
    own, outer = words[places[-1] + 1 :], words[: places[-1]]
    several = [word for word in outer if _kind(word) in _SEVERAL or word.rsplit("/", 1)[-1] in _STARTERS]
    reader = _Reader(own, training.reasons)
    if kind == "torchrun":
        given = _environment(training)
        nodes = reader.count(given.get("PET_NNODES", None if several else "1"), "nnodes", least=2)
        return nodes * reader.count(given.get("PET_NPROC_PER_NODE", "1"), "nproc_per_node", least=2)
    if kind == "accelerate":
        return reader.count(None if declared is None else str(declared), "num_processes", least=5)
    if several:
        raise _not_known(f"{' and '.join([*several, words[places[-1]]])} may each start several ranks")
    options = _options_of(own)
    _one_python(own[len(options) :])
    if kind == "mpirun" and ":" in (*options, *training.after):
        raise _not_known("mpirun starts several programs, with a colon between them")
    reader = _Reader(options, training.reasons)
    if kind == "srun":
        return reader.srun(_environment(training))
    return reader.deepspeed() if kind == "deepspeed" else reader.mpirun()


def _environment(training: Training) -> dict[str, str]:
    """Variables that the launcher gets, as far as the file sets them."""
    pairs = (word.partition("=") for word in training.before if re.match(r"[A-Z_]\w*=", word))
    return training.exports | {name: value for name, _, value in pairs}


def _kind(word: str) -> str:
    return _NAMES.get(word.rsplit("/", 1)[-1]) or _MODULES.get(word, "")


def _hides(words: list[str], place: int) -> bool:
    """Whether a word before the script may stand for options, or a launcher."""
    word, before = words[place], words[place - 1] if place else ""
    if word.startswith("-"):
        return "$" in word.partition("=")[0]
    if not isinstance(word, Hidden):
        return "$" in word and not before.startswith("-") and "=" not in word and place == 0
    return not before.startswith("-") or "=" in before or before in SWITCHES or any(
        part[:1] and part[0].startswith("-") for part in word.alternatives)  # fmt: skip


def _python(words: list[str], exports: dict[str, str]) -> int:
    """One rank, if nothing in the words could start several."""
    rest = list(words)
    while rest and (rest[0] in _NEUTRAL or "=" in rest[0] or (rest[0].startswith("-") and words[0] in _NEUTRAL)):
        rest = rest[1:]
    if not rest or not _PYTHON.fullmatch(rest[0].rsplit("/", 1)[-1]) or not _options_only(rest[1:]):
        raise _not_known(f"what {' '.join(words) or 'the file'} starts is not known: it may be several ranks")
    given = [name for name in _RANK_VARIABLES if name in exports or any(w.startswith(f"{name}=") for w in words)]
    if given:
        raise _not_known(f"the file sets {', '.join(given)}: it may start several ranks by hand")
    return 1


def _options_only(words: list[str]) -> bool:
    return all(
        word.startswith("-") or before in ("-W", "-X") for before, word in zip(["", *words], words, strict=False)
    )


def _options_of(words: list[str]) -> list[str]:
    """A launcher's own options: the words before the program that it starts."""
    place = 0
    while place < len(words) and words[place].startswith("-"):
        word, value = words[place], words[place + 1 : place + 2]
        short = re.fullmatch(r"-[a-zA-Z]\d+", word)
        alone = "=" in word or word in SWITCHES or short or not value or _program(value[0])
        place += 1 if alone else 3 if word.lstrip("-") in _PAIRS else 2
    return words[:place]


def _program(word: str) -> bool:
    name = word.rsplit("/", 1)[-1]
    return name in _WRAPPERS or name.endswith(".sh") or bool(_PYTHON.fullmatch(name))


def _one_python(program: list[str]) -> None:
    """What srun and its like start must be Python itself, or something that starts it once."""
    names = [word.rsplit("/", 1)[-1] for word in program]
    place = next((place for place, name in enumerate(names) if _PYTHON.fullmatch(name)), 0)
    if program and ((place and names[0] not in _WRAPPERS) or not _PYTHON.fullmatch(names[place])
                    or not _options_only(program[place + 1 :])):  # fmt: skip
        raise _not_known(f"what {' '.join(program)} starts is not known: it may be several ranks")


def _not_known(what: str, cause: str = "nothing else in the launch file gives their number") -> KitError:
    return KitError("LG503", what, cause=cause, fix="say how many ranks there will be: --ranks N")


class _Reader:
    """The options of one launcher."""

    def __init__(self, words: list[str], reasons: dict[str, str]) -> None:
        self._words, self._reasons = words, reasons

    def value(self, *flags: str, least: int = 99) -> tuple[str, str | None]:
        """Name and value of the last of some options; a beginning of `least` letters counts as the whole."""
        name, found = flags[0], None
        for place, word in enumerate(self._words):
            option, equals, value = word.partition("=")
            bare = option.lstrip("-").replace("-", "_")
            short = re.fullmatch(r"-([a-zA-Z])(\d+)", word)
            hit = any(bare == flag or (len(bare) >= least and flag.startswith(bare)) for flag in flags)
            if short and short[1] in flags:
                name, found = short[1], short[2]
            elif option.startswith("-") and hit:
                name, found = bare, value if equals else next(iter(self._words[place + 1 : place + 2]), "")
        return name, found

    def count(self, default: str | None, *flags: str, least: int = 99) -> int:
        """A number of at least 1; `default`: where no option gives it. Raises LG503."""
        name, value = self.value(*flags, least=least)
        option = f"{'-' if len(name) == 1 else '--'}{name}"
        value = default if value is None else value
        if value is None:
            raise _not_known(f"{option} is not given in the launch file")
        if re.fullmatch(r"0*[1-9]\d{0,15}", value) and int(value) <= LARGEST_NUMBER:
            return int(value)
        cause = not_read(value, self._reasons) if "$" in value else "it is no plain number of at least 1"
        raise _not_known(f"{option} is {value!r} in the launch file", cause)

    def deepspeed(self) -> int:
        """Of DeepSpeed's launcher."""
        _, include = self.value("include", "i")
        if include is not None:
            hosts = [host.partition(":")[2] for host in include.split("@")]
            if not all(re.fullmatch(r"\d+(,\d+)*", slots) for slots in hosts):
                raise _not_known(f"--include is {include!r} in the launch file", not_read(include, self._reasons))
            return sum(len(set(slots.split(","))) for slots in hosts)
        for option in ("exclude", "e", "hostfile", "H"):
            if self.value(option)[1] is not None and self.value("num_nodes")[1] is None:
                raise _not_known(f"deepspeed takes the ranks from its --{option}")
        return self.count("1", "num_nodes") * self.count(None, "num_gpus")

    def srun(self, environment: dict[str, str]) -> int:
        """Of SLURM, which hands its job's numbers on in variables."""
        tasks, nodes, each = (environment.get(f"SLURM_{name}") for name in ("NTASKS", "NNODES", "NTASKS_PER_NODE"))
        own = [self.value(*names)[1] is not None for names in (("ntasks_per_node",), ("nodes", "N"))]
        if self.value("ntasks", "n")[1] is not None or (tasks is not None and not any(own)):
            return self.count(tasks, "ntasks", "n")
        found = self.count(each, "ntasks_per_node") * self.count(nodes, "nodes", "N")
        if tasks not in (None, str(found)):
            raise _not_known(f"srun's options give {found} tasks, and its job has {tasks}")
        return found

    def mpirun(self) -> int:
        """Of MPI; Open MPI and MPICH call it -n and -np."""
        return self.count(None, "np", "n", "c")
