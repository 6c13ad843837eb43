"""Trees of a user's own: copies of `mini` with an edit, before the patch and after it."""

from __future__ import annotations

import shutil
from pathlib import Path

from leangrpo_tools import data
from leangrpo_tools.apply import apply

TREE = data.data_root() / "patches/mini/tree"
WRAPPED = "return FSDP(policy, auto_wrap_policy=ModuleWrapPolicy(blocks), device_id=device)"
DDP = {WRAPPED: "return nn.parallel.DistributedDataParallel(policy)"}
FSDP2 = {
    WRAPPED: """from torch.distributed.fsdp import fully_shard
    for block in [*policy.transformer_blocks, *policy.single_transformer_blocks]:
        fully_shard(block)
    return fully_shard(policy)""",
}


def both(folder: Path, edits: dict[str, str], file: str = "mini_grpo/train.py") -> tuple[Path, Path]:
    """The untouched and the patched tree, each text of `edits` replaced in both; it must be there once."""
    native, patched = folder / "native", folder / "patched"
    shutil.copytree(TREE, native, ignore=shutil.ignore_patterns("__pycache__"))
    edit(native, edits, file)
    shutil.copytree(native, patched)
    apply("mini", tree=patched)
    return native, patched


def edit(tree: Path, edits: dict[str, str], file: str = "mini_grpo/train.py") -> None:
    """Replaces texts that are there once each."""
    text = (tree / file).read_text()
    for old, new in edits.items():
        assert text.count(old) == 1, (old, text.count(old))
        text = text.replace(old, new)
    (tree / file).write_text(text)
