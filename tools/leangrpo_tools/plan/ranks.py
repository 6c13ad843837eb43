"""How many ranks the words before a training script start. A number that is not written there is never assumed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from leangrpo_tools.errors import KitError
from leangrpo_tools.plan.flagvalues import LARGEST_NUMBER, NOT_READ, not_read
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
_PYTHON = re.compile(r"python[\d.]*")
_RANK_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK")


def is_launcher(word: str) -> bool:
    """Whether a word starts several ranks."""
    return bool(_NAMES.get(word.rsplit("/", 1)[-1]) or _MODULES.get(word))


def has_launcher(words: list[str]) -> bool:
    """Whether one of the words does."""
    return any(map(is_launcher, words))


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
        nodes = reader.count(1 if not several else None, "nnodes", least=2)
        return nodes * reader.count(1, "nproc_per_node", least=2)
    if kind == "accelerate":
        return reader.count(declared, "num_processes", least=5)
    if several:
        raise _not_known(f"{' and '.join([*several, words[places[-1]]])} may each start several ranks")
    _python_at_the_end(own)
    return {"deepspeed": reader.deepspeed, "srun": reader.srun, "mpirun": reader.mpirun}[kind]()


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


def _python_at_the_end(own: list[str]) -> None:
    """What srun and its like start must be Python itself."""
    place = next((place for place, word in enumerate(own) if _PYTHON.fullmatch(word.rsplit("/", 1)[-1])), None)
    if place is not None and not _options_only(own[place + 1 :]):
        raise _not_known(f"what {' '.join(own[place:])} starts is not known: it may be several ranks")


def _not_known(what: str, cause: str = NOT_READ) -> KitError:
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

    def count(self, default: int | None, *flags: str, least: int = 99) -> int:
        """A number of at least 1. Raises LG503."""
        name, value = self.value(*flags, least=least)
        option = f"{'-' if len(name) == 1 else '--'}{name}"
        if value is None:
            if default is None:
                raise _not_known(f"{option} is not given in the launch file")
            return default
        if re.fullmatch(r"0*[1-9]\d{0,15}", value) and int(value) <= LARGEST_NUMBER:
            return int(value)
        raise _not_known(f"{option} is {value!r} in the launch file", not_read(value, self._reasons))

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
        return self.count(1, "num_nodes") * self.count(None, "num_gpus")

    def srun(self) -> int:
        """Of SLURM."""
        if self.value("ntasks", "n")[1] is not None:
            return self.count(None, "ntasks", "n")
        return self.count(None, "ntasks_per_node") * self.count(None, "nodes", "N")

    def mpirun(self) -> int:
        """Of MPI; Open MPI and MPICH call it -n and -np."""
        return self.count(None, "np", "n", "c")
