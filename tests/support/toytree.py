"""A toy upstream with DanceGRPO's shape in other words, so that its recipe can be tested without fetching anything."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import yaml

from leangrpo_tools import data, lock

FLUX = '''\
"""A toy trainer."""
import math
import torch
import torch.distributed as dist
from tqdm import tqdm  # progress

LIMIT = 3


def run_sample_step(args, z, bar, transformer, words,
                    grpo_sample):
    kept = [z]
    for i in bar:
        transformer.eval()
        pred= transformer(
            hidden_states=z,  # the state
            words=words,
        )[0]
        z = flux_step(pred, z, index=i)
        kept.append(z)
    return z, torch.stack(kept, dim=1)


def grpo_one_step(
    args,
    latents,
    words,
    transformer,
    i,
):
    transformer.train()
    pred = transformer(hidden_states=latents, words=words)[0]
    return pred.mean()


def sample_reference_model(args, transformer, words):
    chunks = torch.chunk(torch.arange(len(words)), len(words))
    drawn, all_rewards = [], []
    for batch_idx in chunks:
        z, kept = run_sample_step(args, torch.zeros(1), tqdm(range(4)), transformer, words[batch_idx], True)
        drawn.append(kept)
        if args.one_judge:
            all_rewards.append(kept.mean())
        if args.another_judge:
            all_rewards.append(kept.max())
    return torch.cat(drawn)


def train_one_step(args, transformer, optimizer, encoder_hidden_states, device):
    optimizer.zero_grad()
    # the rollout
    all_latents = sample_reference_model(
        args,
        transformer,
        encoder_hidden_states,
    )
    batch_size = len(all_latents)
    samples = {"timesteps": torch.zeros(batch_size, 4), "latents": all_latents}
    group_rewards = gather_tensor(all_latents.mean(1))
    if dist.get_rank()==0:
        print(group_rewards)
    samples["advantages"] = (group_rewards - group_rewards.mean()) / group_rewards.std()

    perms = torch.stack([
        torch.randperm(len(samples["timesteps"][0]))  # one order each
        for _ in range(batch_size)
    ]).to(device)
    samples_batched = {name: value.unsqueeze(1) for name, value in samples.items()}
    samples_batched_list = [dict(zip(samples_batched, x)) for x in zip(*samples_batched.values())]
    for i, sample in list(enumerate(samples_batched_list)):
        for _ in range(2):
            loss = grpo_one_step(args, sample["latents"][:, _], encoder_hidden_states, transformer, perms[i][_])
            loss.backward()
        if (i+1)%args.gradient_accumulation_steps==0:
            grad_norm = transformer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()

    print(len(samples_batched_list))
    return grad_norm.item()


def gather_tensor(tensor):
    return tensor


def main(args, transformer, optimizer, words):
    print(math.pi)
    train_one_step(args, transformer, optimizer, words, "cpu")
'''

LORA = FLUX.replace(
    "            all_rewards.append(kept.max())\n",
    "            all_rewards.append(kept.max())\n            all_rewards.append(kept.min())\n",
)

WAN = (
    FLUX.replace("        if args.another_judge:\n            all_rewards.append(kept.max())\n", "")
    .replace(
        """        pred= transformer(
            hidden_states=z,  # the state
            words=words,
        )[0]
""",
        """        if args.guide > 1:
            pred = transformer(torch.cat([z, z]), words=words)[0]
        else:
             pred = transformer(z, words=words)[0]
""",
    )
    .replace(
        "    pred = transformer(hidden_states=latents, words=words)[0]\n",
        """    if args.guide > 1:
        pred = transformer(torch.cat([latents, latents]), words=words)[0]
    else:
        pred = transformer(latents, words=words)[0]
""",
    )
)

FILES = {
    "fastvideo/__init__.py": "",
    "fastvideo/train_grpo_flux.py": FLUX,
    "fastvideo/train_grpo_flux_lora.py": LORA,
    "fastvideo/train_grpo_wan_2_1.py": WAN,
    "assets/prompts.txt": "a cat\n" * 100,
    "scripts/run.sh": "#!/bin/sh\ntorchrun fastvideo/train_grpo_flux.py\n",
    "README.md": "toy\n",
}


def git(folder: Path, *args: str) -> str:
    """git as a user runs it."""
    who = ["-c", "user.name=u", "-c", "user.email=u@x", "-c", "init.defaultBranch=main"]
    out = subprocess.run(["git", "-C", str(folder), *who, *args], check=True, capture_output=True, text=True)
    return out.stdout.strip()


def make_upstream(folder: Path) -> Path:
    """A repository with the toy files, two commits."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")
    (folder / "scripts/run.sh").chmod(0o755)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "toy")
    git(folder, "commit", "-q", "--allow-empty", "-m", "pin")
    return folder


def make_kit(folder: Path, upstream: Path) -> Path:
    """Kit data whose DanceGRPO is the toy upstream; recipes are the real ones, DanceGRPO's without other scripts."""
    real = data.data_root()
    shutil.copytree(real / "patches", folder / "patches")
    recipe = folder / "patches/DanceGRPO/recipe.yaml"
    text = recipe.read_text()
    recipe.write_text(text[: text.index("\n  qwenimage:\n") + 1])
    entry = {
        "kind": "git",
        "url": str(upstream),
        "commit": git(upstream, "rev-parse", "HEAD"),
        "tree": git(upstream, "rev-parse", "HEAD^{tree}"),
        "exclude": ["assets/prompts.txt"],
        "licence": "Apache-2.0",
    }
    mini = {
        "kind": "embedded",
        "path": "patches/mini/tree",
        "sha256": lock.content_hash(folder / "patches/mini/tree"),
        "licence": "Apache-2.0",
    }
    text = yaml.safe_dump({"format": 1, "upstreams": {"DanceGRPO": entry, "mini": mini}})
    (folder / "upstreams.lock").write_text(text, encoding="utf-8")
    shutil.copytree(data.core_path(), folder / "leangrpo_core", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def snapshot(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Bytes, mode and mtime of every file outside .git."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and ".git" not in path.relative_to(folder).parts:
            at = path.stat()
            found[str(path.relative_to(folder))] = (path.read_bytes(), at.st_mode, at.st_mtime_ns)
    return found


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Like :func:`snapshot`, less the mtime."""
    return {name: item[:2] for name, item in snapshot(folder).items()}


def newer(root: Path) -> None:
    """A newer kit: one file of the runtime changed, one added, and another text at two places of the script."""
    recipe = root / "patches/DanceGRPO/recipe.yaml"
    text = recipe.read_text()
    new = text.replace("lean.flush(transformer, optimizer)", "lean.flush(transformer, optimizer, tag=2)")
    new = new.replace("from fastvideo._leangrpo import lean", "from fastvideo._leangrpo import (lean)")
    assert new != text
    recipe.write_text(new)
    with open(root / "leangrpo_core/errors.py", "a") as out:
        out.write("# newer\n")
    (root / "leangrpo_core/added.py").write_text("x = 1\n")
