"""What a training script's rehearsal has to provide.

A module under `leangrpo_rehearsal.scripts` defines one subclass of `Script` and binds an instance of it
to the module name `SCRIPT`. The subclass is data plus three or four small methods; running, recording and comparing
are done elsewhere. torch and diffusers may be imported inside the methods marked "in a child": those run in
processes forked from a server that has imported `Script.preload` already. Module level must stay free of torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leangrpo_rehearsal.recorder import Recorder

REWEIGHTED = {"sample": 2e-6, "affine": 5e-6}
"""The bound in fp32, by LEANGRPO_BUFFERS, where gradients are scaled after their backward."""

REWEIGHTED_BF16 = 5e-2
"""In bf16 it makes a difference whether a gradient is rounded before it is scaled or after; neither is nearer to the
truth. Where samples of opposite advantages nearly cancel, the difference is large beside their sum."""

SHARDED = 1e-6
"""The bound, as relative L2, where gradients are added up in another order than natively."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What is rehearsed: the size of the run and the variant of the training script.

    `generations` samples of `steps` trajectory steps are drawn per rank and rollout, `fraction` of the steps
    (`Script.trained`) are trained, in `updates_per_rollout` optimizer updates of equally many samples.
    """

    ranks: int = 1
    updates: int = 2
    updates_per_rollout: int = 1
    precision: str = "fp32"
    checkpointing: bool = False
    ema: bool = False
    schedule: str = "retain"
    buffers: str = "sample"
    budget_gb: str = "unlimited"
    sync: str = "upstream"
    generations: int = 4
    steps: int = 6
    fraction: float = 0.6
    seed: int = 42
    clock: str = "wall"
    """What is timed: `wall` seconds, or `cpu` seconds of the process, on a machine that does other things, too."""
    options: tuple[tuple[str, str], ...] = ()
    """Further options a single script understands, as (name, value); `Script.options` lists them."""

    @property
    def rollouts(self) -> int:
        """Rollouts needed for `updates` optimizer updates (the last may be cut short)."""
        return -(-self.updates // self.updates_per_rollout)

    @property
    def accumulation(self) -> int:
        """Samples per rank that one optimizer update consumes."""
        return self.generations // self.updates_per_rollout

    def option(self, name: str, default: str) -> str:
        """The value of a script's own option."""
        return dict(self.options).get(name, default)


@dataclasses.dataclass(frozen=True)
class Launch:
    """How the script is started, on every rank: `argv` without the script's own path, and extra environment."""

    argv: Sequence[str] = ()
    env: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Bound:
    """What counts as a match: bitwise, or a relative L2 distance of the gradients before clipping."""

    bitwise: bool
    rel_l2: float
    weights: float = 1e-5
    """How far weights may be apart where gradients need not be bitwise equal (AdamW magnifies near zero)."""

    def describe(self) -> str:
        """The bound in words, for the report."""
        return "bitwise" if self.bitwise else f"relative L2 <= {self.rel_l2:g}"


@dataclasses.dataclass(frozen=True)
class Branch:
    """A part of a script that a rehearsal does not enter.

    `chosen` are arguments of `Script.configure` with which another rehearsal enters it, `options` among them as
    (name, value); None where there is none.
    """

    words: str
    chosen: dict[str, Any] | None = None

    def of(self, script: Script, config: Config) -> Config | None:
        """The other rehearsal, or None where there is none with this configuration."""
        if self.chosen is None:
            return None
        fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)} | self.chosen
        fields["options"] = tuple((dict(config.options) | dict(self.chosen.get("options", ()))).items())
        found = script.configure(**fields)
        known = all(name in script.options for name, _ in found.options)
        return found if known and script.supports(found) is None else None


@dataclasses.dataclass
class Context:
    """What a rank's process knows just before the script starts; handed to hooks and injections."""

    rank: int
    world: int
    variant: str
    """native, native-again, native-regrouped, patched or control."""
    config: Config
    workdir: Path
    """The current directory of the script and what `Script.prepare` filled, shared by the ranks of one variant."""
    tree: Path
    recorder: Recorder
    args: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments of the injection that is running."""

    @property
    def patched(self) -> bool:
        """Whether this process runs the patched tree."""
        return not self.variant.startswith("native")

    def after_import(self, name: str, hook: Callable[[Any], None]) -> None:
        """Calls `hook(module)` as soon as a module whose dotted name is `name`, or ends in `.name`, was imported."""
        from leangrpo_rehearsal.importhook import after_import

        after_import(name, hook)


class Script:
    """One training script's rehearsal. Subclass it, bind an instance to `SCRIPT`."""

    name: str = ""
    """As in the recipe and after `--script`."""
    path: str = ""
    """The script's file, relative to the tree's root. The root and the file's folder are put on sys.path."""
    driver: str = ""
    """A module of the kit that is run instead, where upstream ships a class and no script. Only the root is then put on
    sys.path, in front of whatever the environment has installed."""
    defaults: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    """Fields of `Config` whose defaults are others for this script."""
    policy: tuple[str, ...] = ()
    """Classes whose calls are counted as policy forwards, `module:Class`; only the outermost call counts."""
    preload: tuple[str, ...] = ("torch",)
    """What the fork server imports before it forks, `module` or `module:Attribute` for lazily loaded attributes."""
    needs: tuple[tuple[str, str], ...] = ()
    """Packages and the oldest versions with which upstream's script runs, where what is preloaded does not tell."""
    stubs: tuple[str, ...] = ()
    """Top-level modules replaced by an empty stand-in where they are not installed."""
    options: tuple[str, ...] = ()
    """Names understood in `Config.options`."""
    shown: tuple[tuple[str, str], ...] = ()
    """Options with which `leangrpo support` rehearses it, where without them nothing is kept."""
    folders: tuple[str, ...] = ()
    """Folders the script expects in its current directory."""
    deterministic: bool = True
    """Whether two native runs on one rank agree bitwise."""
    synchronised: bool = True
    """Whether upstream shares gradients between ranks. Where it does not, `late` has no native counterpart: the native
    runs then average gradients before clipping, too."""

    replicated: bool = False
    """Whether every rank holds all weights and upstream keeps them equal, so that they can be compared."""

    def configure(self, **chosen: Any) -> Config:
        """The configuration with this script's own defaults for what was not chosen."""
        return Config(**(self.defaults | chosen))

    def trained(self, config: Config) -> int:
        """Trajectory steps trained per sample. The last step has no successor to train on, in most scripts."""
        return int((config.steps - 1) * config.fraction)

    def checkpoints(self, config: Config) -> bool:
        """Whether the script checkpoints activations: as chosen, unless it knows no choice."""
        return config.checkpointing

    def supports(self, config: Config) -> str | None:
        """A reason why this configuration cannot be rehearsed, or None."""
        return None

    def logs_alike(self, config: Config) -> bool:
        """Whether the patched run logs, steps its schedulers and averages weights at the places where a native one
        does."""
        return True

    def updates_per_native_rollout(self, config: Config) -> int:
        """How many updates a native rollout is for; the first of them could be free of recomputation."""
        return config.updates_per_rollout

    def incomparable(self, config: Config) -> str | None:
        """A reason why the patched run trains other samples than a native one, so can only be timed, or None."""
        return None

    def prepare(self, workdir: Path, config: Config) -> None:
        """In a child, once per variant: writes checkpoints and data under `workdir`. Same bytes for every variant."""

    def launch(self, workdir: Path, config: Config) -> Launch:
        """The command line and environment of the script. Native and patched get the same."""
        return Launch()

    def launch_natively(self, workdir: Path, config: Config) -> Launch:
        """The same for the native runs, where a setting of the kit makes other updates of the same samples."""
        return self.launch(workdir, config)

    def across_ranks(self, config: Config) -> bool:
        """Whether the patched run draws samples on other ranks than the native one: rewards are compared over all."""
        return False

    def planned(self, workdir: Path, config: Config) -> Sequence[str]:
        """The words after the script in a launch line that `leangrpo plan` can read for this rehearsal."""
        return self.launch(workdir, config).argv

    def install(self, context: Context) -> None:
        """In a child, last thing before the script starts: script-specific stand-ins (the reward, data loaders)."""

    def flip_advantage(self, context: Context) -> None:
        """In a child, control run only: makes one sample's advantage arrive in the loss with its sign flipped.

        Called on rank 0, before the script starts. Wrap something the script calls; the tree is not edited.
        """
        raise NotImplementedError

    def bound(self, config: Config) -> Bound:
        """What counts as a match: every bit, unless ranks add up their gradients in another order than natively."""
        late = config.sync != "upstream" and config.ranks > 1
        return Bound(bitwise=False, rel_l2=SHARDED) if late or not self.deterministic else Bound(bitwise=True, rel_l2=0)

    def bound_for_schedule(self, config: Config) -> Bound:
        """The same, given how the patched run makes its gradients."""
        plain = self.bound(config)
        buffers = config.buffers
        if config.schedule == "auto" and config.budget_gb not in ("measured", "unlimited"):
            buffers = "affine"  # where graphs do not fit, `auto` may choose either
        elif config.schedule != "reweight":
            return plain
        bound = REWEIGHTED[buffers] if config.precision == "fp32" else REWEIGHTED_BF16
        weights = plain.weights if config.precision == "fp32" else 1e-3
        return dataclasses.replace(plain, bitwise=False, rel_l2=max(bound, plain.rel_l2), weights=weights)

    def averaged(self, config: Config) -> bool:
        """Whether the native runs have to average gradients over the ranks, which this upstream does not do."""
        return config.sync != "upstream" and config.ranks > 1 and not self.synchronised

    def stand_ins(self, config: Config) -> tuple[str, ...]:
        """What native runs are given because of the patched run's settings, by name."""
        return ("averaged",) if self.averaged(config) else ()

    def regrouped(self, config: Config) -> tuple[Config, str] | None:
        """A configuration in which upstream trains the same samples in other batches, and that in words; or None.

        Where batches of rollout and update differ, sums are rounded differently. How much that matters, two native runs
        tell: the bound is then widened to a multiple of their distance.
        """
        return None

    def nothing_to_replay(self, config: Config) -> str:
        """Why the patched run has to recompute everything, though its schedule is `retain`; empty where it has not."""
        return ""

    def branches(self, config: Config) -> list[Branch]:
        """Parts of the script that this configuration does not enter."""
        averaged = dataclasses.replace(config, ema=True)
        return [] if config.ema or self.supports(averaged) else [Branch("EMA (--ema)", {"ema": True})]

    def known_reasons(self, config: Config) -> tuple[str, ...]:
        """Parts of the runtime's reasons for which this rehearsal, by itself, has steps recomputed."""
        return ()

    def notes(self, config: Config) -> list[str]:
        """What a reader of the report has to know about this rehearsal, a sentence each."""
        return []

    def not_tested(self, config: Config) -> list[str]:
        """Script-specific things this rehearsal says nothing about, added to the general list."""
        return []
