"""Train the policy with GRPO: sample groups of pictures, score them, then update on a random part of their steps."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from mini_grpo.data import Prompt, prompt_at
from mini_grpo.ema import Average
from mini_grpo.metrics import Metrics
from mini_grpo.rewards import colour_reward, group_advantages
from mini_grpo.sampling import (
    CHANNELS,
    Sampler,
    Trajectory,
    conditioning,
    log_likelihood,
    noise_levels,
    rollout,
    transition,
)

HEAD = 32


def build_policy(args: argparse.Namespace, device: torch.device, world: int) -> nn.Module:
    """A small FLUX transformer with random weights (the same on every rank), sharded when there are several ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)
        policy = FluxTransformer2DModel(
            in_channels=CHANNELS,
            num_layers=args.layers,
            num_single_layers=2 * args.layers,
            attention_head_dim=HEAD,
            num_attention_heads=args.width // HEAD,
            joint_attention_dim=args.width,
            pooled_projection_dim=args.width,
            axes_dims_rope=(8, 12, 12),
            guidance_embeds=False,
        )
    if args.gradient_checkpointing:
        policy.enable_gradient_checkpointing()
    if world == 1:
        return nn.Module.to(policy, device)
    blocks = {type(block) for block in [*policy.transformer_blocks, *policy.single_transformer_blocks]}
    return FSDP(policy, auto_wrap_policy=ModuleWrapPolicy(blocks), device_id=device)


def rescore(
    policy: nn.Module,
    prompt: Prompt,
    state: Tensor,
    outcome: Tensor,
    step: int,
    sampler: Sampler,
) -> Tensor:
    """Log-probability, with gradient, that the policy as it is now would have gone from `state` to `outcome`."""
    level, following = sampler.levels[step], sampler.levels[step + 1]
    inputs = conditioning(prompt, level)
    with torch.autocast(state.device.type, torch.bfloat16, enabled=sampler.bf16):
        velocity = policy(hidden_states=state, return_dict=False, **inputs)[0]
    mean, deviation = transition(velocity, state, level, following, sampler.eta)
    return log_likelihood(outcome, mean, deviation)


def clipped_loss(log_prob: Tensor, before: Tensor, advantage: Tensor, clip_range: float) -> Tensor:
    """The pessimistic of the plain and the clipped policy-gradient objective, negated."""
    ratio = (log_prob - before).exp()
    bounded = ratio.clamp(1 - clip_range, 1 + clip_range)
    return -torch.minimum(ratio * advantage, bounded * advantage).mean()


def shuffled_steps(drawn: list[Trajectory], order: Tensor) -> dict[str, Tensor]:
    """The trainable steps of all samples, [samples, T - 1, ...], each row in its own order [samples, T - 1]."""
    states = torch.cat([one.states for one in drawn])
    rows = torch.arange(len(drawn))[:, None]
    return {
        "state": states[rows, order],
        "outcome": states[rows, order + 1],
        "log_prob": torch.cat([one.log_probs for one in drawn])[rows, order],
    }


class Trainer:
    """Everything a run holds: the policy, its optimizer, its average, the noise and the metrics."""

    def __init__(self, args: argparse.Namespace, device: torch.device, rank: int, world: int) -> None:
        self.args, self.device, self.rank, self.world = args, device, rank, world
        self.policy = build_policy(args, device, world)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=args.learning_rate, weight_decay=1e-4)
        self.average = Average(self.policy, args.ema_decay) if args.ema_decay else None
        self.metrics = Metrics(args.metrics, self.policy, rank)
        self.noise = torch.Generator(device).manual_seed(args.seed + 1000 + rank)
        self.sampler = Sampler(noise_levels(args.sampling_steps, args.shift), args.eta, args.bf16)
        self.updates = 0

    def train_round(self, number: int) -> None:
        """One rollout and the updates made from it."""
        args = self.args
        first = (number * self.world + self.rank) * args.prompts_per_rollout
        subjects = [prompt_at(first + n, args.width, self.device) for n in range(args.prompts_per_rollout)]
        prompts = [prompt for prompt in subjects for _ in range(args.num_generations)]
        drawn = rollout(self.policy, prompts, self.sampler, self.noise)
        rewards = torch.stack([colour_reward(one.picture, p.colour) for one, p in zip(drawn, prompts, strict=True)])
        advantages = group_advantages(rewards, args.num_generations)
        order = torch.stack([torch.randperm(args.sampling_steps - 1) for _ in prompts])
        batch = shuffled_steps(drawn, order)
        chosen = int((args.sampling_steps - 1) * args.timestep_fraction)
        share = 1 / (args.gradient_accumulation_steps * chosen)
        total = 0.0
        for row, prompt in enumerate(prompts):
            self.policy.train()
            for turn in range(chosen):
                log_prob = rescore(
                    self.policy,
                    prompt,
                    batch["state"][row : row + 1, turn],
                    batch["outcome"][row : row + 1, turn],
                    int(order[row, turn]),
                    self.sampler,
                )
                before = batch["log_prob"][row : row + 1, turn]
                loss = share * clipped_loss(log_prob, before, advantages[row], args.clip_range)
                loss.backward()
                total += loss.item()
            if (row + 1) % args.gradient_accumulation_steps == 0:
                self.update(total, rewards.mean().item())
                total = 0.0

    def update(self, loss: float, reward: float) -> None:
        """Clip, step, write the metrics; every so often evaluate before the next samples are trained."""
        gradients = self.metrics.gradients()
        limit = self.args.max_grad_norm
        if isinstance(self.policy, FSDP):
            norm = self.policy.clip_grad_norm_(limit)
        else:
            norm = nn.utils.clip_grad_norm_(self.policy.parameters(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        if self.average:
            self.average.follow()
        known = {"update": self.updates, "loss": loss, "reward": reward, "grad_norm": norm.item()}
        self.metrics.record(**known, gradients=gradients)
        if self.rank == 0:
            print(f"update {self.updates}: reward {reward:+.4f}, loss {loss:+.6f}, grad norm {norm.item():.4f}")
        if self.args.eval_every and self.updates % self.args.eval_every == 0:
            self.evaluate()

    def evaluate(self) -> None:
        """Mean reward of the (averaged) policy on fixed prompts and fixed noise, with more and calmer steps."""
        prompts = [prompt_at(n, self.args.width, self.device) for n in range(self.args.eval_prompts)]
        calm = Sampler(noise_levels(self.args.eval_steps, self.args.shift), 0.1 * self.args.eta, self.args.bf16)
        noise = torch.Generator(self.device).manual_seed(self.args.seed)
        if self.average:
            self.average.swap()
        drawn = rollout(self.policy, prompts, calm, noise)
        if self.average:
            self.average.swap()
        scores = [colour_reward(one.picture, p.colour).item() for one, p in zip(drawn, prompts, strict=True)]
        if self.rank == 0:
            print(f"evaluation after update {self.updates}: reward {sum(scores) / len(scores):+.4f}")
        self.metrics.restart()


def parse_args() -> argparse.Namespace:
    """The command line; scripts/train.sh has a preset that learns something in a few minutes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--rollouts", type=int, default=3, help="rollouts to train for")
    parser.add_argument("--prompts_per_rollout", type=int, default=1, help="prompts per rank and rollout")
    parser.add_argument("--num_generations", type=int, default=4, help="samples per prompt: the group")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4, help="samples per optimizer update")
    parser.add_argument("--sampling_steps", type=int, default=8)
    parser.add_argument("--timestep_fraction", type=float, default=0.6, help="share of the steps that is trained")
    parser.add_argument("--eta", type=float, default=0.7, help="diffusion of the sampler")
    parser.add_argument("--shift", type=float, default=3.0)
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--clip_range", type=float, default=1e-3)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--ema_decay", type=float, default=0.0, help="0 keeps no average of the weights")
    parser.add_argument("--eval_every", type=int, default=2, help="updates between evaluations, 0 for none")
    parser.add_argument("--eval_steps", type=int, default=12)
    parser.add_argument("--eval_prompts", type=int, default=2)
    parser.add_argument("--width", type=int, default=128, help=f"model width, a multiple of {HEAD}")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--bf16", action="store_true", help="bf16 autocast")
    parser.add_argument("--metrics", type=Path, default=None, help="file for one JSON line per update")
    args = parser.parse_args()
    if (args.prompts_per_rollout * args.num_generations) % args.gradient_accumulation_steps:
        parser.error("--gradient_accumulation_steps must divide prompts_per_rollout x num_generations")
    return args


def main() -> None:
    """Set up the ranks and train."""
    args = parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if world > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(args.seed + rank)
    trainer = Trainer(args, device, rank, world)
    for number in range(args.rollouts):
        trainer.train_round(number)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
