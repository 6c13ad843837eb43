"""`leangrpo plan`'s table: which settings can run, what each holds and sends, and what that makes of the time."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from leangrpo_core import settings
from leangrpo_core.errors import LeanError
from leangrpo_core.layout.parts import Cut
from leangrpo_tools import data
from leangrpo_tools.plan import Machine, Speeds, plan
from leangrpo_tools.plan.choice import Case, Choice
from leangrpo_tools.plan.cost import Rollout
from leangrpo_tools.plan.held import hold
from leangrpo_tools.plan.memory import Memory
from leangrpo_tools.plan.networks import Model
from leangrpo_tools.plan.predict import GAIN, predict
from leangrpo_tools.plan.traffic import Traffic, Wire, traffic

# DanceGRPO's FLUX on 8 GPUs: P = 2 prompts of M = 12, GA = 12, T = 16, S = 9
FLUX = Case(Rollout(24, 24, 16, 9, 12, 3.0), 8, "fsdp", prompts=2, generations=12, flag="--gradient_accumulation_steps")
# and on 16: P = 1, GA = 4
FLUX_16 = replace(FLUX, size=Rollout(12, 12, 16, 9, 4, 3.0), ranks=16, prompts=1)
RETAIN = Choice("retain")
SHARED = Choice("retain", "shared")


def memory(gpu_gb: float, trained: float = 1e9, **more: float) -> Memory:
    """A network of a billion parameters on 8 ranks whose graphs take 0.1 GB: 1e5 tokens of 500 numbers of 2 bytes."""
    model = Model(parameters=1e9, patch=1, text_tokens=0, blocks=1, width=500)
    return Memory(model, trained, 8, 1e5, gpu_gb * 1e9 / 0.95, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("case", "choice", "live", "replayed"),
    [
        (FLUX, RETAIN, 12, 12),
        (FLUX, SHARED, 3, 12),  # g = gcd(12, 8) = 4 ranks a prompt, Q = 3
        (FLUX, Choice("retain", updates="on-policy"), 12, 24),
        (FLUX, Choice("retain", "shared", updates="on-policy"), 3, 24),
        (FLUX_16, RETAIN, 4, 4),
        (FLUX_16, SHARED, 1, 4),  # g = 4: an update takes a third of a group, GA / g = 1 sample of each sub-batch
        (FLUX, Choice(), 12, 0),
    ],
)
def test_samples_held_at_the_same_time(case: Case, choice: Choice, live: int, replayed: int) -> None:
    assert case.replayed(choice) == replayed
    if replayed:
        assert case.live(choice) == live and hold(case, choice, None).graphs == live * 9


def test_why_layouts_and_updates_cannot_be_had() -> None:
    assert "LEANGRPO_LAYOUT=shared" not in FLUX.refused and "LEANGRPO_UPDATES=on-policy" not in FLUX.refused
    assert "--gradient_accumulation_steps 12 would do" in FLUX_16.refused["LEANGRPO_UPDATES=on-policy"]
    both = replace(FLUX, size=replace(FLUX.size, accumulation=8))
    assert "LEANGRPO_LAYOUT=shared" not in both.refused and both.live(SHARED) == 2
    assert "12 or --gradient_accumulation_steps 24" in both.refused["LEANGRPO_UPDATES=on-policy"]
    odd = replace(FLUX, size=replace(FLUX.size, accumulation=3))
    assert "8 ranks, 12 generations and 3 samples per update" in odd.refused["LEANGRPO_LAYOUT=shared"]
    uneven = replace(FLUX, size=replace(FLUX.size, accumulation=10))
    assert "no multiple of the 10" in uneven.refused["LEANGRPO_LAYOUT=shared"]
    assert "no common divisor" in replace(FLUX, ranks=7).refused["LEANGRPO_LAYOUT=shared"]


@pytest.mark.parametrize("ranks", [1, 2, 6, 7, 8])
def test_as_the_runtime_cuts_rollouts(ranks: int) -> None:
    """Sizes that it refuses, and samples whose graphs it holds at the same time."""
    for prompts, group, update in product((1, 2, 3), (4, 6, 12), range(1, 13)):
        if update > prompts * group:
            continue
        size = Rollout(prompts * group, prompts * group, 4, 2, update, 2.0)
        case = Case(size, ranks, "fsdp", prompts=prompts, generations=group)
        for shared, on_policy in ((True, False), (False, True), (True, True)):
            choice = Choice(
                "retain", "shared" if shared else "native", updates="on-policy" if on_policy else "faithful"
            )
            refused = (shared and "LEANGRPO_LAYOUT=shared" in case.refused) or (
                on_policy and "LEANGRPO_UPDATES=on-policy" in case.refused
            )
            if ranks == 1 and shared:
                assert refused  # the runtime lets one rank share with itself, which changes nothing
                continue
            try:
                cut = Cut(prompts, group, update, ranks, shared, on_policy)
            except LeanError:
                assert refused, (prompts, group, update)
                continue
            assert not refused, (prompts, group, update)
            assert case.live(choice) == max(cut.first(part) for part in cut.parts)
            if shared:
                assert (case.sharing, case.part) == (cut.team, cut.slots)


def test_settings_are_the_runtimes_own() -> None:
    for choice in FLUX.choices(host=True):
        pairs = (line.removeprefix("export LEANGRPO_").split("=") for line in choice.exports())
        if choice.schedule in settings.SCHEDULES:
            settings.parse({name.lower(): value for name, value in pairs})


def test_every_choice_once_and_only_those_that_differ() -> None:
    found = list(FLUX.choices())
    assert len(found) == len(set(found))
    # group is late where an update has one group: 2 x recompute, then 2 syncs x 2 layouts x 2 updates of retain and
    # reweight, whose affine buffers pay where more than 3 samples are live
    assert {choice.sync for choice in found if choice.layout == "native"} == {"upstream", "late"}
    assert sum(choice.schedule == "recompute" for choice in found) == 2
    assert sum(choice.schedule == "retain" for choice in found) == 8
    assert {choice.layout for choice in found if choice.buffers == "affine"} == {"native"}
    ddp = replace(FLUX, wrapper="ddp", shared="no", on_policy="no", reweight="no")
    assert list(ddp.choices()) == [Choice(), RETAIN]
    assert not [choice for choice in replace(FLUX, late="low").choices() if choice.sync != "upstream"]
    # two groups in an update: group is one choice more
    assert any(c.sync == "group" for c in replace(FLUX, size=replace(FLUX.size, accumulation=24)).choices())


def test_graphs_that_have_room() -> None:
    """1 billion parameters in fp32: 16 GB of states by 8, and nothing gathered but by a joint backward: 8 GB by 7/8."""
    room = memory(12).room()
    assert room == pytest.approx(10e9) and memory(12).room(joint=True) == pytest.approx(3e9)
    held = hold(FLUX, RETAIN, memory(12))
    assert (held.graphs, held.fit, held.share) == (108, 100, pytest.approx(100 / 108))
    late = hold(FLUX, Choice("retain", sync="late"), memory(12))
    assert (late.fit, late.share) == (30, pytest.approx(30 / 108))
    assert hold(FLUX, SHARED, memory(12)).share == 1.0
    away = hold(FLUX, replace(RETAIN, offloads=True), memory(12, host_bytes=1e9))
    assert (away.fit, away.on_host, away.share) == (100, 5, pytest.approx(105 / 108))


def test_gradients_that_have_room() -> None:
    """A full gradient is 4 GB, a trajectory's graphs 0.9: sharded wrappers hold both."""
    sample = Choice("reweight")
    held = hold(FLUX, sample, memory(12))
    assert (held.graphs, held.gradients, held.share) == (9, 2, pytest.approx(2 / 12))
    affine = replace(sample, buffers="affine")
    assert hold(FLUX, affine, memory(12)).share == 0  # three gradients, 12 GB and 0.9, into 10
    assert hold(FLUX, affine, memory(15)).share == 1.0
    # Four ranks share a prompt: one full gradient and two shards for either team of the eight, 4 + 4 * 0.5 GB.
    shared = hold(FLUX, replace(affine, layout="shared"), memory(12))
    assert shared.gradients == 1.5 and shared.bytes == pytest.approx(0.9e9 + 6e9)
    alone = replace(FLUX, wrapper="none")
    assert hold(alone, sample, replace(memory(36), sharded=False)).graphs == 1  # one step's


@pytest.mark.parametrize(
    ("choice", "gathers", "reductions"),
    [
        (Choice(), 384 + 216 + 216, 216),
        (RETAIN, 384 + 216 + 216 - 108, 216),
        (Choice("retain", sync="late"), 384 + 216 + 216 - 108 - 107, 2),
        (Choice(sync="late"), 384 + 216 + 216, 2),
        (Choice("retain", "shared", "late"), 384 + 216 + 216 - 108 - 104, 2),  # four sub-batches of 3
        (Choice("retain", updates="on-policy"), 384 + 216, 216),
        (Choice("retain", sync="late", updates="on-policy"), 384 + 2, 2),
        (Choice("reweight"), 384 + 216 + 216 - 108, 108 + 1),
        (Choice("reweight", sync="late"), 384 + 216 + 216 - 108, 2),
        (Choice("reweight", updates="on-policy"), 384 + 216, 2),
        (Choice("reweight", "shared"), 384 + 216 + 216 - 108, 108 + 4),
        (Choice("reweight", "shared", buffers="affine"), 384 + 216 + 216 - 108, 108 + 4 + 12),
        (Choice("reweight", "shared", "late", buffers="affine"), 384 + 216 + 216 - 108, 1 + 4 + 12),
    ],
)
def test_collectives_by_hand(choice: Choice, gathers: int, reductions: int) -> None:
    """384 forwards without gradient, 216 with and as many backward passes; 108 forwards are replayed."""
    assert traffic(FLUX, choice, 1.0) == Traffic(gathers, reductions)


def test_collectives_of_a_part_and_of_other_wrappers() -> None:
    assert traffic(FLUX, RETAIN, 0.5) == Traffic(384 + 216 + 216 - 54, 216)
    assert traffic(FLUX, Choice("retain", sync="late"), 0.5) == Traffic(384 + 216 + 216 - 54 - 53, 3)
    assert traffic(replace(FLUX, wrapper="ddp"), RETAIN, 1.0) == Traffic(averages=2)
    assert (
        traffic(replace(FLUX, wrapper="none"), RETAIN, 1.0) == traffic(replace(FLUX, ranks=1), RETAIN, 1.0) == Traffic()
    )
    two = replace(FLUX, size=replace(FLUX.size, accumulation=24))
    assert traffic(two, Choice("retain", sync="group"), 1.0) == Traffic(384 + 2, 2)
    assert traffic(two, Choice("retain", "shared", "group"), 1.0) == Traffic(384 + 8, 8)


def test_bytes_on_the_wire() -> None:
    """7/8 of ten times 2 bytes of each weight, three times 4 bytes of each gradient, and twice that for an average."""
    assert Traffic(10, 3).bytes(1e9, 1e8, 8, Wire(2, 4)) == pytest.approx(0.875 * (20e9 + 1.2e9))
    assert Traffic(averages=1).bytes(1e9, 1e8, 2, Wire()) == pytest.approx(0.5 * 2 * 4e8)


# The paper's ablation (arXiv 2609.03528): FLUX on 8 A6000, all steps selected, FSDP2, seconds per update, with
# activation checkpointing. Weights are gathered in bf16 and gradients reduced in fp32.
PAPER = {
    ("full", "native"): 1850, ("full", "late"): 1388, ("full", "retain"): 1439, ("full", "reweight"): 1023,
    ("lora", "native"): 1277, ("lora", "late"): 1263, ("lora", "retain"): 902, ("lora", "reweight"): 881,
}  # fmt: skip
CHOICES = {
    "native": Choice(), "late": Choice(sync="late"), "retain": RETAIN, "reweight": Choice("reweight"),
}  # fmt: skip
FLUX_MODEL = Model(parameters=11.9e9, patch=16, text_tokens=512, blocks=57, width=3072)


def paper(training: str, forward: float, link: float) -> dict[str, float]:
    """Seconds for 12 samples of 16 steps, all of them trained, at so many seconds per forward and bytes per second."""
    size = Rollout(12, 12, 16, 16, 12, {"full": 3.0, "lora": 2.2}[training])
    case = Case(size, 8, "fsdp", prompts=1, generations=12)
    room = Memory(FLUX_MODEL, {"full": 11.9e9, "lora": 149e6}[training], 8, 720.0**2, 1e15)
    table = predict(case, room, Speeds(link_gb=link / 1e9, forward_seconds=forward), Wire(2, 4))
    rows = {row.choice: row.total for row in [table.native, *table.rows]}
    return {name: rows[choice] for name, choice in CHOICES.items()}


def test_the_papers_ablation() -> None:
    """Two native times fix the two speeds; the other six are then predicted, within 3 % (as seconds)."""
    # Seconds are linear in both speeds: what one second per forward costs, and one per byte.
    per_forward = {training: paper(training, 1.0, 1e30) for training in ("full", "lora")}
    per_byte = {training: paper(training, 1e-12, 1.0) for training in ("full", "lora")}
    a, b = per_forward["full"]["native"], per_byte["full"]["native"]
    c, d = per_forward["lora"]["native"], per_byte["lora"]["native"]
    full, lora = PAPER["full", "native"], PAPER["lora", "native"]
    forward, byte = (full * d - lora * b) / (a * d - b * c), (a * lora - c * full) / (a * d - b * c)
    assert 0.5 < forward < 1.0 and 10e9 < 1 / byte < 30e9  # a plausible A6000 on PCIe
    errors = {}
    for training in ("full", "lora"):
        for name, seconds in paper(training, forward, 1 / byte).items():
            errors[training, name] = seconds / PAPER[training, name] - 1
    print({key: f"{error:+.1%}" for key, error in errors.items()})
    assert max(abs(errors["full", "native"]), abs(errors["lora", "native"])) < 1e-6
    assert max(map(abs, errors.values())) < 0.035
    assert errors["full", "late"] == pytest.approx(0, abs=0.01)


def test_rows_are_sorted_and_the_runner_up_differs() -> None:
    table = predict(FLUX, memory(12, trained=1e8), Speeds(forward_seconds=0.1), Wire())
    ratios = [row.rounded for row in table.rows]
    assert ratios == sorted(ratios, reverse=True) and all(row.choice.updates == "faithful" for row in table.rows)
    assert table.apart and all(row.choice.updates == "on-policy" for row in table.apart)
    best, second = table.recommended, table.runner_up
    assert best and second and best is table.rows[0]
    assert (best.choice.schedule, best.choice.layout, best.choice.sync) != (
        second.choice.schedule, second.choice.layout, second.choice.sync
    )  # fmt: skip


def test_a_ratio_is_native_time_over_its_own() -> None:
    """24 x 16 + 216 x (1 + 3) forwards of 0.1 s, and 816 + 216 times 7/8 of 4 GB at 100 GB/s."""
    table = predict(FLUX, memory(1e6), Speeds(forward_seconds=0.1, link_gb=100), Wire())
    assert table.native.compute == pytest.approx(124.8)
    assert table.native.communication == pytest.approx((816 + 216) * 0.875 * 4 / 100)
    row = next(row for row in table.rows if row.choice == RETAIN)
    assert row.ratio == pytest.approx((124.8 + 1032 * 0.035) / (124.8 - 10.8 + (1032 - 108) * 0.035))


def test_what_is_measured_counts() -> None:
    """Forwards with gradient of 1.5, a backward of 2, 10 s of other things."""
    size = Machine(grad_forward=1.5, backward=2.0).measured(FLUX.size)
    table = predict(replace(FLUX, size=size, ranks=1), None, Speeds(forward_seconds=1.0, rest_seconds=10), Wire())
    assert table.native.total == pytest.approx(384 + 216 * 3.5 + 10)
    assert table.rows[0].ratio == pytest.approx(1150 / (1150 - 108))


def test_what_does_not_fit_is_not_offered() -> None:
    nothing = predict(FLUX, memory(1.9), Speeds(), Wire())
    assert not nothing.rows and nothing.recommended is None and nothing.native.held.room < 0  # type: ignore[operator]
    little = predict(FLUX, memory(2.05), Speeds(), Wire())
    assert [row.choice.schedule for row in little.rows] == []
    assert GAIN > 1


def test_without_a_model_ratios_are_computes_alone() -> None:
    table = predict(FLUX, None, Speeds(), Wire())
    assert not table.seconds and not table.communicates and table.native.total == 1248
    assert table.rows[0].choice == RETAIN and table.rows[0].ratio == pytest.approx(1248 / 1140)


FLAGS = (
    "--gradient_checkpointing --train_sp_batch_size 2 --gradient_accumulation_steps 12 --sampling_steps 16 "
    "--num_generations 12 --timestep_fraction 0.6 --h 720 --w 720 --selective_checkpointing 1.0"
)


def test_text_and_json_of_a_launch_file(tmp_path: Path) -> None:
    file = tmp_path / "launch.sh"
    file.write_text(f"torchrun --nproc_per_node=8 fastvideo/train_grpo_flux.py {FLAGS} --use_group\n")
    report = plan("danceGRPO", file, machine=Machine(141, other_gb=10))
    text, found = report.render(), json.loads(json.dumps(report.to_json(), allow_nan=False))["predicted"]
    assert found["recommended"][:3] == [
        "export LEANGRPO_SCHEDULE=retain", "export LEANGRPO_LAYOUT=shared", "export LEANGRPO_SYNC=late",
    ]  # fmt: skip
    assert found["recommended"][3].startswith("export LEANGRPO_BUDGET_GB=")
    assert all(f"  {line}\n" in text for line in found["recommended"])
    # states 23.8, gathered 3 x 4 x 0.34 + 4 x 0.34, other 10
    assert (
        found["bytes_by_part"]["gathered"] == pytest.approx(16 * 339_831_296)
        and found["bytes_by_part"]["other"] == 10e9
    )
    assert sum(found["bytes_by_part"].values()) == pytest.approx(23.803e9 + 5.4373e9 + 10e9, rel=1e-4)
    assert "at 300 TFLOP/s" in text and "200 GB/s" in text and "collapses" in text
    rows = {tuple(row["settings"][:1]): row for row in found["choices"]}
    assert rows["export LEANGRPO_SCHEDULE=recompute",]["held"]["graphs"] == 0


def test_without_groups_neither_layout_nor_updates(tmp_path: Path) -> None:
    file = tmp_path / "launch.sh"
    file.write_text(f"torchrun --nproc_per_node=8 fastvideo/train_grpo_flux.py {FLAGS.replace('12 --s', '2 --s')}\n")
    text = plan("danceGRPO", file).render()
    assert "LEANGRPO_LAYOUT=shared: it needs --use_group" in text and "=on-policy: it needs --use_group" in text


def test_mini_from_its_launch_file_with_bytes() -> None:
    said = ["gradient_checkpointing=false", "bf16=false", "width=128", "layers=2"]
    file = data.data_root() / "patches/mini/tree/scripts/train.sh"
    assert plan("mini", file, overrides=said[:1]).memory is None
    report = plan("mini", file, overrides=said)
    assert report.table.recommended and report.table.recommended.choice == RETAIN
    assert report.memory and report.memory.graph == pytest.approx(19.0e6, rel=0.01)  # 19.00 MB were measured
