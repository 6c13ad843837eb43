"""Comparisons with the native trainer that name every parameter at fault."""

import torch

from .grpo import Result


def assert_same(lean: Result, native: Result, rtol: float = 0.0) -> None:
    """Same updates: gradients (relative L2 per update) and, for `rtol` 0, gradients and weights to the bit.

    A gradient that is None on one side only is an error, and so is anything that is not finite.
    """
    assert len(lean.gradients) == len(native.gradients) > 0
    wrong = []
    for update, (ours, theirs) in enumerate(zip(lean.gradients, native.gradients, strict=True)):
        assert ours.keys() == theirs.keys()
        off = size = 0.0
        for name in theirs:
            a, b = ours[name], theirs[name]
            if (a is None) != (b is None):
                wrong.append(f"update {update} {name}: lean {a is not None}, native {b is not None}")
            elif a is not None and b is not None:
                off += float((a.double() - b.double()).square().sum())
                size += float(b.double().square().sum())
                if rtol == 0 and not torch.equal(a, b):
                    wrong.append(f"update {update} {name}: gradient off by {float((a - b).abs().max()):.3g}")
        relative = (off / size) ** 0.5 if size else off
        if not relative <= rtol:
            wrong.append(f"update {update}: relative L2 {relative:.3g} > {rtol:g}")
    if rtol == 0:
        for update, (ours_w, theirs_w) in enumerate(zip(lean.weights, native.weights, strict=True)):
            names = [name for name in theirs_w if not torch.equal(ours_w[name], theirs_w[name])]
            wrong += [f"update {update} {name}: weights differ" for name in names]
    assert not wrong, "\n".join(wrong)
