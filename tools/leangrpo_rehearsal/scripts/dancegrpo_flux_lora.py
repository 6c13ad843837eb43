"""DanceGRPO, `fastvideo/train_grpo_flux_lora.py`: LoRA under FSDP1, each adapter layer a unit of its own."""

from __future__ import annotations

from pathlib import Path

from leangrpo_rehearsal.base import Config, Context, Launch
from leangrpo_rehearsal.scripts.dancegrpo import settings
from leangrpo_rehearsal.scripts.dancegrpo_flux import Flux
from leangrpo_rehearsal.scripts.tiny import random_adapters


class FluxLora(Flux):
    """The tiny FLUX of `flux` with adapters of rank 4, and as scale 2 as in upstream's launch file."""

    name = "flux_lora"
    path = "fastvideo/train_grpo_flux_lora.py"
    skipped_batches = 1  # init_steps + 1
    preload = (*Flux.preload, "diffusers:FluxPipeline", "diffusers.loaders.peft", "peft.tuners.lora")

    def supports(self, config: Config) -> str | None:
        """Upstream's script has no EMA."""
        return "upstream's flux_lora script has no EMA" if config.ema else super().supports(config)

    def launch(self, workdir: Path, config: Config) -> Launch:
        """As `scripts/finetune/finetune_flux_grpo_8gpus_lora.sh`."""
        argv = [*self.launch_arguments(workdir, config), "--lora_rank", "4", "--lora_alpha", "8"]
        return Launch(argv, settings(config))

    def install(self, context: Context) -> None:
        """The reward, and adapters without zeros."""
        super().install(context)
        random_adapters()

    def not_tested(self, config: Config) -> list[str]:
        """Where training resumes from an adapter's checkpoint, the adapter's weights are read from a file."""
        return [*super().not_tested(config), "--resume_from_lora_checkpoint, and the first update from B = 0"]


SCRIPT = FluxLora()
