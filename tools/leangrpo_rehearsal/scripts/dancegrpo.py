"""What the rehearsals of DanceGRPO's scripts share: the reward, command line, data and the flipped advantage."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leangrpo_rehearsal.base import SHARDED, Bound, Branch, Config, Context, Launch, Script
from leangrpo_rehearsal.scripts import indexed
from leangrpo_rehearsal.scripts.tiny import flip_clamped

PRELOAD = (
    "torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "transformers:T5EncoderModel",
    "transformers:AutoTokenizer", "transformers:CLIPTextModel", "peft", "accelerate", "PIL.Image", "safetensors.torch",
    "diffusers.optimization", "diffusers.video_processor",
)  # fmt: skip
STUBS = (
    "torchvision", "flash_attn", "liger_kernel", "decord", "loguru", "trl", "datasets", "hpsv3", "cv2", "einops",
    "timm", "qwen_vl_utils", "ml_collections", "absl", "matplotlib", "pandas", "imageio", "torchtitan", "torchao",
)  # fmt: skip
CLIP_MAX = 5.0
TEXT_TOKENS = 5
TEXT_DIM = 32


class DanceGRPO(Script):
    """Base of the scripts that roll out one sample per forward and score images with HPSv2."""

    stubs = STUBS
    folders = ("images", "videos", "data")
    options = (
        "learning_rate", "same_noise", "prompts", "generations", "layout", "updates", "side", "group", "checkpoints",
        "clip_range",
    )  # fmt: skip

    def configure(self, **chosen: Any) -> Config:
        """Samples per rank are `prompts` times `generations`."""
        config = super().configure(**chosen)
        sizes = config.option("prompts", "1"), config.option("generations", str(config.generations))
        if not all(size.isdecimal() for size in sizes):  # `supports` says so
            return config
        return dataclasses.replace(config, generations=int(sizes[0]) * int(sizes[1]))

    def supports(self, config: Config) -> str | None:
        """Updates per rollout have to divide the samples, and prompts, too."""
        for name in ("prompts", "generations"):
            if not config.option(name, "1").isdecimal() or int(config.option(name, "1")) < 1:
                return f"{name} is {config.option(name, '')!r}; allowed: whole numbers from 1"
        prompts = int(config.option("prompts", "1"))
        if config.option("updates", "faithful") == "on-policy" and prompts % config.updates_per_rollout:
            return (
                f"on-policy, each of {config.updates_per_rollout} updates per rollout takes whole prompts: there are "
                f"{prompts} (option prompts)"
            )
        if self.across_ranks(config) and config.ranks > 1 and config.sync == "upstream" and not self.synchronised:
            return "shared prompts need shared gradients, which this script lacks: --sync late averages them"
        if config.generations % config.updates_per_rollout:
            sizes = [size for size in range(1, config.generations + 1) if config.generations % size == 0]
            return (
                f"{config.updates_per_rollout} updates per rollout do not divide {config.generations} samples; "
                f"{', '.join(map(str, sizes))} do"
            )
        for name, allowed in (("layout", ("native", "shared")), ("updates", ("faithful", "on-policy"))):
            if config.option(name, allowed[0]) not in allowed:
                return f"{name} is {config.option(name, '')!r}; allowed: {', '.join(allowed)}"
        if _in_parts(config) and config.option("same_noise", "1") != "1":
            return "layout and updates are rehearsed with same_noise=1 only"
        return None

    def launch_natively(self, workdir: Path, config: Config) -> Launch:
        """Updates that are on-policy are those of a run whose rollouts are as large as an update."""
        if config.option("updates", "faithful") == "on-policy":
            kept = tuple((name, value) for name, value in config.options if name != "prompts")
            prompts = int(config.option("prompts", "1")) // config.updates_per_rollout
            config = dataclasses.replace(
                config,
                generations=config.accumulation,
                updates_per_rollout=1,
                options=(*kept, ("prompts", str(prompts))),
            )
        return self.launch(workdir, config)

    def logs_alike(self, config: Config) -> bool:
        """Parts of a rollout are logged one by one."""
        return not _in_parts(config)

    def updates_per_native_rollout(self, config: Config) -> int:
        """On-policy, each update has a rollout of its own."""
        return 1 if config.option("updates", "faithful") == "on-policy" else config.updates_per_rollout

    def across_ranks(self, config: Config) -> bool:
        """Whether samples are drawn on other ranks than natively."""
        return config.option("layout", "native") == "shared"

    def bound(self, config: Config) -> Bound:
        """Several ranks that share prompts add up other samples' gradients first."""
        bound = super().bound(config)
        return Bound(bitwise=False, rel_l2=SHARDED) if self.across_ranks(config) and config.ranks > 1 else bound

    def launch_arguments(self, workdir: Path, config: Config) -> list[str]:
        """Upstream's launch file with everything small; flags as its shell scripts spell them."""
        model = workdir / "model"
        saves = 1 if config.option("checkpoints", "0") == "1" else 1000000
        values: dict[str, Any] = {
            "seed": config.seed, "pretrained_model_name_or_path": model, "vae_model_path": model, "output_dir": "out",
            "cache_dir": workdir / "cache", "data_json_path": workdir / "data/videos2caption.json",
            "train_batch_size": config.option("prompts", "1"), "train_sp_batch_size": config.option("prompts", "1"),
            "sp_size": 1, "num_latent_t": 1,
            "dataloader_num_workers": 4,
            "gradient_accumulation_steps": config.accumulation, "max_train_steps": config.rollouts,
            "learning_rate": config.option("learning_rate", "1e-3"), "mixed_precision": "bf16", "cfg": 0.0,
            "checkpointing_steps": saves, "h": config.option("side", "32"), "w": config.option("side", "32"), "t": 1,
            "sampling_steps": config.steps, "eta": 0.3,
            "lr_warmup_steps": 0, "sampler_seed": 1223627, "max_grad_norm": 0.01, "weight_decay": 0.0001,
            "num_generations": config.generations // int(config.option("prompts", "1")),
            "shift": 3, "timestep_fraction": config.fraction,
            "clip_range": config.option("clip_range", "0.1"), "adv_clip_max": CLIP_MAX,
        }  # fmt: skip
        argv = [text for name, value in values.items() for text in (f"--{name}", str(value))]
        argv += ["--use_hpsv2", "--ignore_last", "--allow_tf32"]
        if config.option("group", "1") == "1":
            argv.append("--use_group")
        if config.option("same_noise", "1") == "1":
            argv.append("--init_same_noise")
        if config.checkpointing:
            argv.append("--gradient_checkpointing")
        return argv

    def install(self, context: Context) -> None:
        """The fake HPSv2 model, and float32 weights where fp32 is rehearsed."""
        from leangrpo_rehearsal.scripts.hpsv2 import install

        install(context.recorder)
        _reward_checkpoint()
        if _in_parts(context.config):
            indexed.install(context, indexed.calls_per_rollout(context.config, context.world, context.patched))
        if context.config.precision == "fp32":
            load_in_float32()

    advantages = 1
    """How many advantages a sample has."""

    def flip_advantage(self, context: Context) -> None:
        """The first sample's advantage: the script clamps it symmetrically right before the loss."""
        flip_clamped(self.trained(context.config) * self.advantages, CLIP_MAX)

    def notes(self, config: Config) -> list[str]:
        """On-policy updates are another algorithm, so what they are compared with is, too."""
        if config.option("updates", "faithful") != "on-policy":
            return []
        return [
            "on-policy updates: the native runs are the untouched script with rollouts as small as one update "
            f"({config.updates_per_rollout} of them for each of the patched run's)"
        ]

    def branches(self, config: Config) -> list[Branch]:
        """What the command line switches on or off, and what needs several prompts, or a save."""
        found = super().branches(config)
        if config.option("group", "1") == "1":
            alone = (("group", "0"), ("prompts", str(config.generations)), ("generations", "1"))
            found.append(Branch(
                "without --use_group (advantages over all ranks' rewards)",
                {"options": alone} if config.option("prompts", "1") == "1" else None,
            ))  # fmt: skip
        if config.option("same_noise", "1") == "1":
            found.append(Branch("without --init_same_noise", {"options": (("same_noise", "0"),)}))
        if config.option("prompts", "1") == "1":
            several = (("prompts", "2"), ("generations", str(config.generations // 2)))
            words = "several prompts per rank (each group's place among the samples, --option prompts=2)"
            found.append(Branch(words, {"options": several} if config.generations % 4 == 0 else None))
        if config.option("checkpoints", "0") == "0":
            found.append(Branch("saving checkpoints", {"options": (("checkpoints", "1"),)}))
        return [*found, *self._settings(config), Branch("resuming from a checkpoint")]

    def _settings(self, config: Config) -> list[Branch]:
        """Settings of the kit that a patched script goes other ways with."""
        if "updates" not in self.options or _in_parts(config) or config.option("same_noise", "1") != "1":
            return []
        prompts = max(int(config.option("prompts", "1")), config.updates_per_rollout, 2)
        sizes = (("prompts", str(prompts)), ("generations", str(max(config.generations // prompts, 2))))
        on_policy, shared = ({"options": (*sizes, item)} for item in (("updates", "on-policy"), ("layout", "shared")))
        return [
            Branch("LEANGRPO_UPDATES=on-policy (--option updates=on-policy)", on_policy),
            Branch("LEANGRPO_LAYOUT=shared (--option layout=shared)", shared if config.ranks > 1 else None),
        ]

    def not_tested(self, config: Config) -> list[str]:
        """The reward is always a stand-in here."""
        return ["upstream's HPSv2 and PickScore rewards (a deterministic stand-in scored the images)"]


def _in_parts(config: Config) -> bool:
    """Whether the patched run draws samples in another order than natively, or on other ranks."""
    return config.option("layout", "native") != "native" or config.option("updates", "faithful") != "faithful"


def settings(config: Config) -> dict[str, str]:
    """Settings of the runtime that are options here."""
    found = {"layout": "native", "updates": "faithful"}
    return {f"LEANGRPO_{name.upper()}": config.option(name, default) for name, default in found.items()}


def _reward_checkpoint() -> None:
    """Forks read HPSv2's weights from folders of their own; the stand-in has none, wherever they would be."""
    import torch

    load = torch.load

    def without_reward(file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, (str, Path)) and Path(file).name.startswith("HPS_v2"):
            return {"state_dict": {}}
        return load(file, *args, **kwargs)

    torch.load = without_reward


def load_in_float32() -> None:
    """bf16 weights rely on autocast, which fp32 switches off: load every model of the script in float32."""
    import torch
    from diffusers import ModelMixin

    original = ModelMixin.from_pretrained.__func__  # type: ignore[attr-defined]

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["torch_dtype"] = torch.float32
        return original(cls, *args, **kwargs)

    ModelMixin.from_pretrained = classmethod(from_pretrained)  # type: ignore[assignment]


def write_prompts(
    workdir: Path, config: Config, tensors: Mapping[str, tuple[str, tuple[int, ...]]], skipped: int = 0
) -> None:
    """Writes the data set: per prompt one file in each folder of `tensors`, {folder: (key in the list, shape)}.

    `skipped` batches are read by each rank before the first rollout.
    """
    import torch

    data = workdir / "data"
    rows = []
    # One batch per rank and rollout; some scripts read the data set once only.
    for index in range(config.ranks * (config.rollouts + skipped) * int(config.option("prompts", "1"))):
        row = {"caption": f"prompt {index}"}
        for folder, (key, shape) in tensors.items():
            (data / folder).mkdir(parents=True, exist_ok=True)
            torch.save(torch.randn(shape), data / folder / f"{index}.pt")
            row[key] = f"{index}.pt"
        rows.append(row)
    (data / "videos2caption.json").write_text(json.dumps(rows))


def write_masks(data: Path, tokens: int, shortest: int, **numbers: int) -> None:
    """Gives the prompts of the data set unequal lengths, from `shortest` to `tokens`, and masks; padding comes behind.

    `numbers` are added to each row of the list.
    """
    import torch

    file = data / "videos2caption.json"
    rows = json.loads(file.read_text())
    for index, row in enumerate(rows):
        row |= {"original_length": shortest + index % (tokens - shortest), **numbers}
        mask = (torch.arange(tokens) < row["original_length"]).long()
        torch.save(mask, data / "prompt_attention_mask" / row["prompt_attention_mask"])
    file.write_text(json.dumps(rows))
