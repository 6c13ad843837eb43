"""FlowGRPO, `scripts/train_flux.py`: one call per step with embedded guidance; under bf16 inputs differ by rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leangrpo_rehearsal.base import Config, Context
from leangrpo_rehearsal.scripts import tiny_text
from leangrpo_rehearsal.scripts.flowgrpo import PRELOAD, FlowGRPO
from leangrpo_rehearsal.scripts.tiny import randomise


class Flux(FlowGRPO):
    """Two double and two single blocks of width 32 on latents of 8 by 8, which make 16 tokens."""

    name = "flux"
    path = "scripts/train_flux.py"
    kind = "FluxPipeline"
    policy = ("diffusers:FluxTransformer2DModel",)
    preload = (
        *PRELOAD, "diffusers:FluxPipeline", "diffusers:FluxTransformer2DModel", "diffusers:AutoencoderKL",
        "diffusers:FlowMatchEulerDiscreteScheduler", "transformers:CLIPTextModel",
    )  # fmt: skip
    options = (*FlowGRPO.options, "clip_range")

    def preset(self, config: Config) -> dict[str, Any]:
        """Upstream's clip range unless another one is asked for: under bf16 rounding decides which samples it clips."""
        clip_range = config.option("clip_range", "")
        return {"train.clip_range": float(clip_range)} if clip_range else {}

    def misfit(self, config: Config) -> str | None:
        """Where steps are replayed for rounded inputs, the stand-in has to know which ones: all of an update's."""
        if self.rounded(config) and config.option("masked", "0") == "1":
            return "inputs=rounded is rehearsed without masked"
        return super().misfit(config)

    def rounded(self, config: Config) -> bool:
        """Whether the patched run replays steps whose timestep the rollout rounds and the update does not."""
        low, allowed = config.precision != "fp32", config.option("inputs", "exact") == "rounded"
        return low and allowed and config.schedule != "recompute"

    def nothing_to_replay(self, config: Config) -> str:
        """Under bf16 no step has the rollout's inputs, if equal values in another precision do not count, either."""
        if config.precision == "fp32" or config.option("lora", "1") != "1" or self.rounded(config):
            return ""
        return "the rollout hands the network its timestep in bf16, the update in fp32 (inputs=rounded replays)"

    def stand_ins(self, config: Config) -> tuple[str, ...]:
        """With inputs=rounded, the timestep of the first update."""
        return (*super().stand_ins(config), *(["rounded"] if self.rounded(config) else []))

    def install(self, context: Context) -> None:
        """Rounds the timestep of the native runs' first updates where the patched run replays it."""
        super().install(context)
        config = context.config
        if self.rounded(config) and not context.patched:
            batches = config.generations // int(config.option("batch", "2"))
            _round_timesteps(batches // config.updates_per_rollout * self.trained(config))

    def notes(self, config: Config) -> list[str]:
        """Where native runs do not train with upstream's own timesteps."""
        if not self.rounded(config):
            return super().notes(config)
        return [
            *super().notes(config),
            "the rollout rounds the timestep and the update does not; the patched run replays all the same "
            "(inputs=rounded), and in those updates the native runs get the rollout's timestep, and latents in its "
            "layout, by a stand-in: this says nothing about the distance from upstream's own gradient",
        ]

    def pipeline(self, folder: Path, config: Config) -> None:
        """The pipeline of `kind`."""
        import diffusers

        transformer = diffusers.FluxTransformer2DModel(
            patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=2 * tiny_text.WIDTH, pooled_projection_dim=tiny_text.WIDTH,
            guidance_embeds=True, axes_dims_rope=(4, 6, 6),
        )  # fmt: skip
        randomise(transformer)
        # diffusers annotates these as tuples of one.
        down: Any = ("DownEncoderBlock2D",) * 3
        up: Any = ("UpDecoderBlock2D",) * 3
        channels: Any = (8, 8, 8)
        vae = diffusers.AutoencoderKL(
            down_block_types=down, up_block_types=up, block_out_channels=channels, latent_channels=4,
            norm_num_groups=2, sample_size=32, shift_factor=0.1, scaling_factor=0.4,
        )  # fmt: skip
        parts: dict[str, Any] = {
            "transformer": transformer, "vae": vae,
            "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            "text_encoder": tiny_text.clip_encoder(), "text_encoder_2": tiny_text.t5_encoder(),
            "tokenizer": tiny_text.clip_tokenizer(folder.parent / "words"), "tokenizer_2": tiny_text.t5_tokenizer(),
        }  # fmt: skip
        getattr(diffusers, self.kind)(**parts).save_pretrained(folder)


def _round_timesteps(calls: int) -> None:
    """In the first `calls` calls with grad after a rollout the network gets its inputs as a rollout in bf16 does."""
    import diffusers
    import torch

    network: Any = diffusers.FluxTransformer2DModel
    forward, low, left = network.forward, torch.bfloat16, 0

    def rounding(self: Any, *, hidden_states: Any, timestep: Any, **kwargs: Any) -> Any:
        nonlocal left
        if timestep.dtype == low:  # a rollout's own
            left = calls
        elif left and torch.is_grad_enabled():
            left -= 1
            timestep = (timestep * 1000).to(low) / 1000
            # A linear layer in bf16 rounds once more where its input is a slice.
            hidden_states = hidden_states.contiguous()
        return forward(self, hidden_states=hidden_states, timestep=timestep, **kwargs)

    network.forward = rounding


SCRIPT = Flux()
