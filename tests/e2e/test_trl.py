"""The real TRL, where it is in the cache: what the recipe changes and what it leaves alone."""

from __future__ import annotations

import pytest
from support.toytree import contents, git

from leangrpo_tools import fetch, lock
from leangrpo_tools.apply import apply
from leangrpo_tools.diff import diff
from leangrpo_tools.revert import revert

pytestmark = pytest.mark.upstream
TRAINER, PIPELINE = "trl/trainer/ddpo_trainer.py", "trl/models/modeling_sd_base.py"


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory):
    entry = lock.load().upstreams["trl-ddpo"]
    assert not isinstance(entry, lock.EmbeddedEntry)
    if not fetch.cached("trl-ddpo", entry):
        pytest.skip("TRL is not in the cache; fill it with: apply-patch trl-ddpo /tmp/x [--source URL|PATH]")
    return apply("trl-ddpo", tmp_path_factory.mktemp("real") / "d")


def test_every_anchor_matches_and_only_two_files_change(patched) -> None:
    trainer, pipeline = ((patched.dest / name).read_text() for name in (TRAINER, PIPELINE))
    assert trainer.count("lean.policy_call(") == 2 and trainer.count("lean.at(") == 2
    for call in ("rollout", "row_order", "step_order", "identity", "flush"):
        assert trainer.count(f"lean.{call}(") == 1, call
    assert "torch.randperm" not in trainer and "self.sd_pipeline.unet(" not in trainer
    assert pipeline.count("lean.") == 3  # one call, and the rows in it, and the step function
    added = [line for line in diff(patched.dest).text.decode().splitlines() if line.startswith("+")]
    assert max(map(len, added)) <= 120
    assert "2 files changed" in diff(patched.dest, stat=True).text.decode()
    assert git(patched.dest, "status", "--porcelain") == ""
    assert any("LEANGRPO_SYNC=late" in text for text in patched.warnings)


def test_backpropagation_through_sampling_is_left_alone(patched) -> None:
    def behind(text: str) -> str:
        return text[text.index("def pipeline_step_with_grad") :]

    native = git(patched.dest, "show", f"HEAD^:{PIPELINE}")
    assert behind((patched.dest / PIPELINE).read_text()).strip() == behind(native).strip()


def test_round_trip(patched) -> None:
    after = contents(patched.dest)
    revert(patched.dest)
    assert git(patched.dest, "status", "--porcelain") == "" and not (patched.dest / "trl/_leangrpo").exists()
    apply("trl-ddpo", patched.dest)
    assert contents(patched.dest) == after
