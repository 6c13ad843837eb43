"""What the rehearsals of scripts with upstream's own HunyuanVideo network share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leangrpo_rehearsal.base import Config, Context
from leangrpo_rehearsal.scripts.dancegrpo import (
    PRELOAD,
    TEXT_DIM,
    TEXT_TOKENS,
    DanceGRPO,
    write_masks,
    write_prompts,
)
from leangrpo_rehearsal.scripts.tiny import save
from leangrpo_rehearsal.scripts.videos import video_align, videos_in_memory

PADDED = 3
MODELS = "fastvideo.models.hunyuan_hf.modeling_hunyuan"


class Hunyuan(DanceGRPO):
    """One double and two single blocks of width 32, a one-frame video; attention by torch, not flash-attn."""

    policy = (f"{MODELS}:HunyuanVideoTransformer3DModel",)
    preload = (*PRELOAD, "diffusers:AutoencoderKLHunyuanVideo", "diffusers:HunyuanVideoPipeline",
               "diffusers:MochiPipeline", "diffusers:FluxPipeline", "diffusers:AutoencoderKLMochi")  # fmt: skip
    channels = 16
    """What goes into the network."""

    def supports(self, config: Config) -> str | None:
        """No EMA upstream, and no parts: the runtime refuses them for these scripts."""
        if config.ema:
            return f"upstream's {self.name} script has no EMA"
        if config.option("layout", "native") != "native" or config.option("updates", "faithful") != "faithful":
            return "layout and updates need a script whose training step takes its prompts as arguments"
        return super().supports(config)

    def prepare(self, workdir: Path, config: Config) -> None:
        """VAE and prompts; the network is made in the script's process, from the tree's own class."""
        from diffusers import AutoencoderKLHunyuanVideo

        channels: Any = (4, 4, 4, 4)
        vae = AutoencoderKLHunyuanVideo(block_out_channels=channels, layers_per_block=1, norm_num_groups=2)
        save(vae, workdir / "model/vae", scale=0.3)
        tokens = TEXT_TOKENS + PADDED
        write_prompts(workdir, config, {
            "prompt_embed": ("prompt_embed_path", (1 + tokens, TEXT_DIM)),  # the first one is the pooled embedding
            "prompt_attention_mask": ("prompt_attention_mask", (tokens,)),
        })  # fmt: skip
        write_masks(workdir / "data", tokens, TEXT_TOKENS)

    def video_arguments(self, workdir: Path, config: Config) -> list[str]:
        """The command line without what other scripts know and these do not."""
        argv = self.launch_arguments(workdir, config)
        for name in ("--clip_range", "--adv_clip_max", *self.unknown):
            at = argv.index(name)
            del argv[at : at + 2]
        flags = {"--use_hpsv2", "--ignore_last", *self.unknown_flags}
        return [text for text in argv if text not in flags] + ["--use_videoalign", "--fps", "8"]

    unknown: tuple[str, ...] = ()
    unknown_flags: tuple[str, ...] = ()

    def install(self, context: Context) -> None:
        """The reward, videos in memory, the tiny network, attention without flash-attn."""
        super().install(context)
        video_align(context.recorder, videos_in_memory())
        context.after_import("models.flash_attn_no_pad", _attention_of_torch)
        context.after_import("hunyuan_hf.modeling_hunyuan", lambda module: _make_tiny(module, self.channels))
        _vae_stays()

    def not_tested(self, config: Config) -> list[str]:
        """Video files, VideoAlign and flash-attn are not there."""
        return [
            "upstream's VideoAlign reward (a deterministic stand-in scored the first frame)",
            "writing and reading the video file (the first frame stayed in memory)",
            "flash-attn (torch's attention ran)",
        ]


def _attention_of_torch(module: Any) -> None:
    import torch

    def flash_attn_no_pad(qkv: Any, key_padding_mask: Any, **kwargs: Any) -> Any:
        """[batch, tokens, 3, heads, width] to [batch, tokens, heads, width]; nothing where tokens are padding."""
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        kept = key_padding_mask.bool()
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=kept[:, None, None, :])
        return out.transpose(1, 2) * kept[:, :, None, None]

    module.flash_attn_no_pad = flash_attn_no_pad


def _make_tiny(module: Any, channels: int) -> None:
    """`from_pretrained` makes a small network, its weights the same on each rank and in each run."""
    import torch

    def from_pretrained(cls: Any, *args: Any, torch_dtype: Any = None, **kwargs: Any) -> Any:
        net = cls(
            in_channels=channels, out_channels=16, num_attention_heads=2, attention_head_dim=16, num_layers=1,
            num_single_layers=2, num_refiner_layers=1, text_embed_dim=TEXT_DIM, pooled_projection_dim=16,
            rope_axes_dim=(4, 6, 6),
        )  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                offset = 1.0 if "norm" in name and name.endswith("weight") else 0.0
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.08 + offset)
        return net.to(torch_dtype)

    module.HunyuanVideoTransformer3DModel.from_pretrained = classmethod(from_pretrained)


def _vae_stays() -> None:
    """Upstream moves the VAE to "cuda" by name."""
    from diffusers import AutoencoderKLHunyuanVideo

    move: Any = AutoencoderKLHunyuanVideo.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self if args == ("cuda",) else move(self, *args, **kwargs)

    AutoencoderKLHunyuanVideo.to = to  # type: ignore[method-assign]
