"""Single faults for `tests/matrix/test_single_faults.py`: a mistake in a patched script, its recipe or its runtime.

Kinds: `gone`: the numbers stay right and nothing, or less, is saved. `unseen`: wrong where a default rehearsal may not
come by; it must be caught or stand under "not tested". `wrong`: gradients, weights, or what else is compared.
`harmless`: no fault at all, which the run shows: equal in every bit, and everything is replayed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from support.edits import (
    Edit,
    after,
    argument,
    assigned,
    before,
    begins,
    condition,
    drop,
    keyword,
    name,
    twice,
    value,
)

GONE, UNSEEN, WRONG, HARMLESS = "gone", "unseen", "wrong", "harmless"


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault. `named` is a part of the report's "not tested" under which it may stand; or why it is harmless.

    `text` is a change of a file of the vendored runtime: (module, old, new). `ranks` are the sizes it is tried with.
    """

    what: str
    kind: str
    edits: Sequence[Edit] = ()
    named: str = ""
    text: tuple[str, str, str] | None = None
    ranks: tuple[int, ...] = (1,)
    options: tuple[tuple[str, str], ...] = ()
    ema: bool = False
    precision: str = "fp32"
    recipe: str = ""
    """The edit of the recipe that is left out."""


BOTH = (1, 2)
ON_RANK_1 = "int(os.environ['RANK'])"

FLUX = [
    # The saving is gone.
    Fault("rows shifted by one in the rollout", GONE, [keyword("run_sample_step", "lean_rows", "_ + 1")], ranks=BOTH),
    Fault("rows shifted on rank 1", GONE, [keyword("run_sample_step", "lean_rows", f"_ + {ON_RANK_1}")], ranks=(2,)),
    Fault("rows reversed in the rollout", GONE, [keyword("run_sample_step", "lean_rows", "3 - _")]),
    Fault("one row in the rollout", GONE, [keyword("run_sample_step", "lean_rows", "_ * 0")], ranks=BOTH),
    Fault("no rows in the rollout", GONE, [keyword("run_sample_step", "lean_rows", "None")]),
    Fault("one step in the rollout", GONE, [argument("lean.rollout_call", 2, "0")]),
    Fault("steps shifted in the rollout", GONE, [argument("lean.rollout_call", 2, "_ + 1")]),
    Fault("one row in the update", GONE, [keyword("grpo_one_step", "lean_rows", "_ * 0")], ranks=BOTH),
    Fault("rows shifted in the update", GONE, [keyword("grpo_one_step", "lean_rows", "_ + 1")]),
    Fault("no rows in the update", GONE, [keyword("grpo_one_step", "lean_rows", "None")]),
    Fault("one step in the update", GONE, [keyword("grpo_one_step", "lean_steps", "_ * 0")], ranks=BOTH),
    Fault("steps shifted in the update", GONE, [keyword("grpo_one_step", "lean_steps", "_ + 1")]),
    Fault(
        "flush after each backward", GONE, [after("loss.backward", "lean.flush(transformer, optimizer)")], ranks=BOTH
    ),
    Fault("a window of one sample", GONE, [keyword("lean.rollout", "window", "1")], ranks=BOTH),
    Fault("a window of two updates", GONE, [keyword("lean.rollout", "window", "_ * 2")], ranks=BOTH),
    Fault("one step less in the window", GONE, [keyword("lean.rollout", "trained", "_ - 1")]),
    Fault("two steps more in the window", GONE, [keyword("lean.rollout", "trained", "_ + 2")]),
    Fault(
        "another site in the update",
        GONE,
        [value("lean.policy_call", "(setattr(lean, 'x', 0), _)[1]"), argument("lean.policy_call", 2, "_ + 100")],
    ),
    Fault(
        "text ids in float64",
        HARMLESS,
        [keyword("lean.policy_call", "txt_ids", "_.double()")],
        "the network makes ids float32 before it uses them",
        ranks=BOTH,
    ),
    # Beside gradients.
    Fault("scheduler stepped twice", UNSEEN, [twice("lr_scheduler.step")], ranks=BOTH),
    Fault("scheduler never stepped", UNSEEN, [drop("lr_scheduler.step")]),
    Fault("loss added up twice", UNSEEN, [twice("avg_loss.item")], ranks=BOTH),
    Fault("loss reduced by SUM", UNSEEN, [name("dist.ReduceOp.AVG", "dist.ReduceOp.SUM")], "exchange", ranks=BOTH),
    Fault("loss not reduced", UNSEEN, [drop("dist.all_reduce", "train_one_step")], "exchange", ranks=BOTH),
    Fault("another norm returned", UNSEEN, [value("lean.layout.norm", "_ * 2")]),
    Fault("another learning rate logged", UNSEEN, [value("lr_scheduler.get_last_lr", "[2 * rate for rate in _]")]),
    Fault("the branch without --use_group", UNSEEN, [value("gathered_reward.std", "_ * 2")], "--use_group"),
    Fault(
        "the branch without one noise",
        UNSEEN,
        [condition("not args.init_same_noise", "_ and 1 / 0")],
        "--init_same_noise",
    ),
    Fault("saving raises", UNSEEN, [before("save_checkpoint", "raise OSError('full')")], "saving checkpoints"),
    Fault("group start index constant", UNSEEN, [assigned("start_idx", "0")], "several prompts"),
    Fault("group end index constant", UNSEEN, [assigned("end_idx", "args.num_generations")], "several prompts"),
    Fault(
        "captions of the first prompt",
        UNSEEN,
        [assigned("caption", "[caption[0]] * len(_)", "train_one_step")],
        "several prompts",
    ),
    Fault("EMA never, not rehearsed", UNSEEN, [drop("ema_handler.update")], "EMA"),
    Fault("EMA twice, not rehearsed", UNSEEN, [twice("ema_handler.update")], "EMA"),
    Fault("EMA never", WRONG, [drop("ema_handler.update")], ema=True),
    Fault("EMA twice", WRONG, [twice("ema_handler.update")], ema=True),
    Fault("EMA decay", WRONG, [argument("FSDP_EMA", 1, "_ * 0.9")], ema=True, ranks=BOTH),
    Fault("clip range x10", WRONG, [assigned("clip_range", "_ * 10")], ranks=BOTH),
    Fault("no clipped loss", WRONG, [assigned("clipped_loss", "unclipped_loss")]),
    Fault("minimum in place of maximum", WRONG, [name("torch.maximum", "torch.minimum")]),
    Fault("norm limit x10", WRONG, [argument("transformer.clip_grad_norm_", 0, "_ * 10")]),
    Fault(
        "autocast off in the update",
        WRONG,
        [value("torch.autocast", "torch.autocast('cuda', enabled=False)", "grpo_one_step")],
    ),
    Fault(
        "autocast off in the update, bf16",
        WRONG,
        [value("torch.autocast", "torch.autocast('cuda', enabled=False)", "grpo_one_step")],
        precision="bf16",
    ),
    Fault(
        "autocast off in the rollout",
        WRONG,
        [value("torch.autocast", "torch.autocast('cuda', enabled=False)", "run_sample_step")],
        precision="bf16",
    ),
    # Gradients and weights.
    Fault("flush never", WRONG, [drop("lean.flush")], ranks=BOTH),
    Fault(
        "flush behind clipping",
        WRONG,
        [drop("lean.flush"), after("transformer.clip_grad_norm_", "lean.flush(transformer, optimizer)")],
    ),
    Fault("flush on rank 0 only", WRONG, [value("lean.flush", "dist.get_rank() or _")], ranks=(2,)),
    Fault("gradients dropped before the step", WRONG, [before("optimizer.step", "optimizer.zero_grad()")]),
    Fault("gradients never dropped", WRONG, [drop("lean.layout.zero_grad")]),
    Fault("step twice", WRONG, [twice("optimizer.step")]),
    Fault("step never", WRONG, [drop("optimizer.step")]),
    Fault("no clipping", WRONG, [assigned("grad_norm", "torch.zeros(())")]),
    Fault("loss of the other sign", WRONG, [assigned("loss", "-_", "train_one_step")]),
    Fault("loss x1.0001", WRONG, [assigned("loss", "_ * 1.0001", "train_one_step")], ranks=BOTH),
    Fault("ratio detached", WRONG, [assigned("ratio", "_.detach()")]),
    Fault("advantage clamped to positive", WRONG, [assigned("advantages", "_.abs()", "train_one_step")]),
    Fault("group mean shifted", WRONG, [assigned("group_mean", "_ + 0.1")]),
    Fault("group deviation doubled", WRONG, [assigned("group_std", "_ * 2")]),
    Fault("steps in order", WRONG, [assigned("perms", "_.sort(dim=1).values", "train_one_step")]),
    Fault("step index constant", WRONG, [argument("grpo_one_step", 9, "0")]),
    Fault("an update ends after each sample", WRONG, [value("lean.layout.ends_update", "True")]),
    Fault("an update never ends early", WRONG, [value("lean.layout.ends_update", "_ and i > 2")]),
    Fault("first noise scaled", WRONG, [value("lean.layout.initial_noise", "_ * 1.01")]),  # 1.001 is none in bf16
    Fault("reward shifted", WRONG, [argument("lean.rewarded", 2, "_ + 0.01")]),
    Fault("time scaled in the update", WRONG, [keyword("lean.policy_call", "timestep", "_ * 0.9")]),
    Fault("prompt scaled in the update", WRONG, [keyword("lean.policy_call", "pooled_projections", "_ * 1.01")]),
    Fault("rate doubled after an update", WRONG, [after("lr_scheduler.step", "optimizer.param_groups[0]['lr'] *= 2")]),
    Fault(
        "weights written between",
        WRONG,
        [after("optimizer.step", "[p.data.mul_(1 + 1e-6) for p in transformer.parameters()]")],
    ),
    Fault("policy called on a copy", WRONG, [argument("lean.policy_call", 0, "__import__('copy').deepcopy(_)")]),
    Fault("policy called without gradient", WRONG, [begins("grpo_one_step", "torch.set_grad_enabled(False)")]),
    Fault("window left out", GONE, [value("lean.rollout", "__import__('contextlib').nullcontext()")]),
    # The recipe: a place left out.
    *(
        Fault(f"recipe without {place}", kind, recipe=place, named="LEANGRPO_UPDATES" if place == "boundary" else "")
        for place, kind in (
            ("flush", WRONG),
            ("policy_rows", GONE),
            ("policy_steps", GONE),
            ("rollout_rows", GONE),
            ("order", WRONG),
            ("identity", WRONG),
            ("boundary", UNSEEN),
        )
    ),
    # The runtime.
    Fault(
        "outputs scaled",
        WRONG,
        text=("kept", "part.detach().clone() for part in parts]", "part.detach().clone() * 1.001 for part in parts]"),
        ranks=BOTH,
    ),
    Fault("gradients halved", WRONG, text=("kept", "else leaf.grad\n", "else leaf.grad / 2\n"), ranks=BOTH),
    Fault(
        "nothing is found, and the window says all was",
        GONE,
        text=(
            "replay",
            "    if held:\n        reason = _why_not",
            "    window.replayed, held = window.replayed + len(held), {}\n    if held:\n        reason = _why_not",
        ),
    ),
    Fault("one rank's order twice", WRONG, text=("order", "return self.steps.clone()", "return self.steps.flip(1)")),
    Fault(
        "every other call is not kept",
        GONE,
        text=(
            "window",
            "        self.kept += len(keys)\n",
            "        self.kept += len(keys)\n        if self.calls % 2:\n            self.drop(list(keys), 'x')\n",
        ),
    ),
]

MINI = [
    Fault("rows shifted in the rollout", GONE, [keyword("draw", "lean_rows", "_ + 1")], ranks=BOTH),
    Fault("one row in the rollout", GONE, [keyword("draw", "lean_rows", "0")]),
    Fault("one row in the update", GONE, [keyword("rescore", "lean_rows", "_ * 0")]),
    Fault("one step in the update", GONE, [keyword("rescore", "lean_steps", "_ * 0")]),
    Fault("a window of one sample", GONE, [keyword("lean.rollout", "window", "1")], ranks=BOTH),
    Fault("flush after each backward", GONE, [after("loss.backward", "lean.flush(self.policy, self.optimizer)")]),
    Fault("flush never", WRONG, [drop("lean.flush")]),
    Fault("EMA never", WRONG, [drop("self.average.follow")], ema=True),
    Fault("EMA twice", WRONG, [twice("self.average.follow")], ema=True),
    Fault("EMA never, not rehearsed", UNSEEN, [drop("self.average.follow")], "EMA"),
    Fault("clip range x10", WRONG, [argument("clipped_loss", 3, "_ * 10")]),
    Fault("loss x1.0001", WRONG, [assigned("loss", "_ * 1.0001", "train_round")]),
]

SD3 = [
    Fault("rows shifted in the rollout", GONE, [argument("lean.rollout_batch", 0, "_ + 1")]),
    Fault("a window of one batch", GONE, [keyword("lean.rollout_batch", "window", "1")]),
    Fault("a window of two updates", GONE, [keyword("lean.rollout_batch", "window", "_ * 2")]),
    Fault("flush after each backward", GONE, [after("accelerator.backward", "lean.flush(transformer, optimizer)")]),
    Fault("flush never", WRONG, [drop("lean.flush")]),
    Fault("EMA never", WRONG, [drop("ema.step")], ema=True),
    Fault("EMA twice", WRONG, [twice("ema.step")], ema=True),
    Fault("EMA never, not rehearsed", UNSEEN, [drop("ema.step")], "EMA"),
    Fault("loss x1.01", WRONG, [assigned("loss", "_ * 1.01")]),
    Fault("logged numbers summed up", UNSEEN, [keyword("accelerator.reduce", "reduction", "'sum'")], "exchange"),
]
