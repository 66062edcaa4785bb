"""Replay of amax histories, against a plain loop, and against doors that really ran."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.diagnose.history import DEFAULT_SETTINGS, HistoryScore, predict_scales, replay
from ottava.engine.quantizer import LinearQuantizers
from ottava.numerics.formats import E4M3, E5M2
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.recipe import Recipe
from ottava.record.amaxes import RecordedTensor, Recording, Setting

# --- a plain loop, written from the rule and not from the code --------------------------------------------------------

CODES = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


def scale_for(amax: np.float32, largest: float, margin: int, pow2: bool) -> np.float32:
    scale = np.float32(largest * 2.0**-margin) / amax
    return np.float32(2.0 ** (math.frexp(float(scale))[1] - 1)) if pow2 else scale


def clips(value: np.float32, name: str) -> bool:
    """Whether it would round to a number above the largest; halved, torch's cast can say, for that number exists.

    Twice the largest and beyond clip in any case. They must not reach the cast: torch 2.11 makes NaN of what is above
    the largest even when halved, and a NaN is above nothing.
    """
    largest = torch.finfo(CODES[name]).max
    halves = torch.tensor([largest / 2, min(float(value), 2 * largest) / 2])
    top, rounded = halves.to(CODES[name]).float()
    return bool(rounded > top)


def loop(
    series: list[float], name: str, setting: Setting, *, guard_bits: int = 3, pow2: bool = False
) -> tuple[HistoryScore, list[int], list[float]]:
    """(what one tensor would have met, the steps that clipped, the scales used)."""
    largest = float(torch.finfo(CODES[name]).max)
    window: list[np.float32] = []
    clipped_at, worst, lost, fires, used_scales = [], 0.0, [], 0, []
    for step, value in enumerate(series):
        amax = np.float32(value)
        if amax == 0:
            used_scales.append(0.0)
            continue
        current = scale_for(amax, largest, setting.margin, pow2)
        scale = current
        if window:
            basis = max(window) if setting.amax_compute_algo == "max" else window[-1]
            scale = scale_for(basis, largest, setting.margin, pow2)
            inside = largest * 2.0**-guard_bits <= amax * scale <= largest
            fires += not inside and np.float32(1) / scale != np.float32(1) / current
        used_scales.append(float(scale))
        if clips(amax * scale, name):
            clipped_at.append(step)
            worst = max(worst, math.log2(amax * scale / largest))
        lost.append(max(0.0, math.log2(scale_for(amax, largest, 0, pow2) / np.float64(scale))))
        window = [*window, amax][-setting.amax_history_len :]
    if not lost:
        return HistoryScore(0, 0, 0.0, 0.0, 0.0, 0), [], used_scales
    p99 = sorted(lost)[math.ceil(0.99 * len(lost)) - 1]
    outcome = HistoryScore(len(lost), len(clipped_at), worst, sum(lost) / len(lost), p99, fires)
    return outcome, clipped_at, used_scales


def assert_same(got: HistoryScore, wanted: HistoryScore) -> None:
    """Counts exactly; what a logarithm made to 12 digits."""
    assert (got.casts, got.clipped, got.guard_fires) == (wanted.casts, wanted.clipped, wanted.guard_fires)
    for name in ("worst_clip_octaves", "lost_bits_mean", "lost_bits_p99"):
        assert getattr(got, name) == pytest.approx(getattr(wanted, name), rel=1e-6, abs=1e-6)


def wandering(steps: int, tensors: int, idle: float = 0.2) -> Tensor:
    """Random walks over octaves with spikes, in which every tensor is idle now and then; the last one always."""
    walk = (0.3 * torch.randn(steps, tensors)).cumsum(0)
    spikes = 8 * (torch.rand(steps, tensors) < 0.05)
    amax = torch.exp2(walk + spikes) * (torch.rand(steps, tensors) >= idle)
    amax[:, -1] = 0
    return amax


@pytest.mark.parametrize(
    "setting",
    [
        *(Setting(length, "max", margin) for length in (1, 2, 3, 5, 16, 100) for margin in (0, 1)),
        Setting(1, "most_recent", 0),
        Setting(16, "most_recent", 2),
        Setting(4, "max", -1),
    ],
    ids=str,
)
def test_replay_agrees_with_a_plain_loop(setting: Setting) -> None:
    """60 steps of six tensors of three kinds, one of them never cast."""
    amax = wandering(60, 6)
    tensors = tuple(
        RecordedTensor(f"l{i}", "input", fmt, scale_format, bits)
        for i, (fmt, scale_format, bits) in enumerate(
            [
                (E4M3, "fp32", 3),
                (E5M2, "fp32", 3),
                (E4M3, "fp32", 3),
                (E4M3, "pow2", 3),
                (E5M2, "fp32", 1),
                (E4M3, "fp32", 3),
            ]
        )
    )
    recording = Recording(tensors, tuple(range(1, 61)), amax)
    (outcome,) = replay(recording, [setting]).outcomes
    steps: set[int] = set()
    scales = predict_scales(recording, setting)
    for i, tensor in enumerate(tensors):
        wanted, clipped_at, used = loop(
            amax[:, i].tolist(),
            tensor.format.name,
            setting,
            guard_bits=tensor.guard_bits,
            pow2=tensor.scale_format == "pow2",
        )
        assert_same(outcome.tensors[i], wanted)
        assert torch.equal(scales[:, i], torch.tensor(used, dtype=torch.float32))
        steps |= set(clipped_at)
    assert outcome.clipped_steps == len(steps)
    assert outcome.total.clipped == sum(one.clipped for one in outcome.tensors)
    assert outcome.total.guard_fires == sum(one.guard_fires for one in outcome.tensors)
    means = [one.lost_bits_mean * one.casts for one in outcome.tensors]
    assert outcome.total.lost_bits_mean == pytest.approx(sum(means) / outcome.total.casts)


def test_numbers_by_hand() -> None:
    """E4M3, amax 1 2 1 8 1, L=2, max, margin 0: scales 448 (its own), 448, 224, 224, 56.

    2 * 448 = 896 clips by one octave, 8 * 224 by two; 1 * 224 loses a bit, 1 * 56 three. The guard (3 bits) fires for
    both clips; the last one lands at 56 = 448 / 8, which is still inside.
    """
    recording = Recording.of({"fc.input": ("E4M3", [1, 2, 1, 8, 1])})
    (outcome,) = replay(recording, [Setting(2)]).outcomes
    assert predict_scales(recording, Setting(2)).flatten().tolist() == [448, 448, 224, 224, 56]
    assert outcome.total == HistoryScore(5, 2, 2.0, 4 / 5, 3.0, 2)
    assert outcome.clipped_steps == 2


def test_amax_within_rounding_of_the_top_does_not_clip() -> None:
    """1.03 * 448 = 461.4 rounds to 448 in any case; 1.04 * 448 = 465.9 would round to 480, which is clipped."""
    for amax, clipped in ((1.03, 0), (1.04, 1)):
        recording = Recording.of({"fc.input": ("E4M3", [1.0, amax])})
        (outcome,) = replay(recording, [Setting(1)]).outcomes
        assert outcome.total.clipped == clipped


def test_a_tie_at_the_top_goes_where_the_cast_takes_it() -> None:
    """464 to 448, whose neighbour 480 is odd; 61440 to 65536, which E5M2 does not have: clipped."""
    for fmt, amaxes, clipped in (("E4M3", [448.0, 464.0], 0), ("E5M2", [57344.0, 61440.0], 1)):
        (outcome,) = replay(Recording.of({"fc.input": (fmt, amaxes)}), [Setting(1)]).outcomes
        assert outcome.total.clipped == clipped


# --- doors that really ran --------------------------------------------------------------------------------------------


def recipe_with(scaling: str, **change: Any) -> Recipe:
    """`delayed` or `guarded` with every cell changed."""
    recipe = ottava.get_recipe(scaling)

    def changed(gemm: Any) -> Any:
        return replace(gemm, lhs=replace(gemm.lhs, **change), rhs=replace(gemm.rhs, **change))

    return replace(recipe, **{name: changed(getattr(recipe, name)) for name in ("fprop", "dgrad", "wgrad")})


class TwoLayers(nn.Module):
    """The second layer is idle in every third step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor, step: int) -> Tensor:
        y = self.first(x)
        return self.second(y) if step % 3 else y


@pytest.mark.parametrize("scaling", ["delayed", "guarded"])
@pytest.mark.parametrize(
    "setting, scale_format",
    [(Setting(4, "max", 1), "fp32"), (Setting(3, "most_recent", 0), "fp32"), (Setting(16, "max", 0), "pow2")],
)
def test_replay_under_the_own_setting_repeats_the_run_bit_for_bit(
    scaling: str, setting: Setting, scale_format: str
) -> None:
    """A model trained with real doors: every scale they used, and how often the guard fired, come out of its amaxes."""
    change = {"amax_history_len": setting.amax_history_len, "amax_compute_algo": setting.amax_compute_algo}
    model = TwoLayers().bfloat16()
    ottava.convert(model, recipe_with(scaling, margin=setting.margin, scale_format=scale_format, **change))
    state, optimizer = ottava.ScalingState(model), torch.optim.SGD(model.parameters(), lr=1e-6)
    used: dict[tuple[str, str], float] = {}
    for layer, module in model.named_modules():
        if isinstance(module, LinearQuantizers):
            for tensor, door in module.named_children():
                key = (layer.removesuffix(".quantizers"), tensor)
                door.register_forward_hook(
                    lambda door, args, output, key=key: used.update({key: used_scale_inv(output)})
                )
    rows, seen = [], []
    for step in range(12):
        used.clear()
        x = torch.randn(8, 64, dtype=torch.bfloat16) * 2.0 ** torch.randint(-4, 5, ()).item()
        model(x, step).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            for weight in model.parameters():
                weight *= torch.exp2(torch.randn(()))
        optimizer.zero_grad()
        rows.append(state.take_amax())
        seen.append([used.get((door.layer, door.tensor), 0.0) for door in rows[-1]])
    assert all(math.isfinite(value) for row in seen for value in row)
    recording = Recording(
        tuple(RecordedTensor.of(door.layer, door.tensor, door.spec) for door in rows[0]),
        tuple(range(12)),
        torch.tensor([[door.amax for door in row] for row in rows]),
    )
    assert recording.setting == setting
    (outcome,) = replay(recording, [setting]).outcomes
    scales = predict_scales(recording, setting)
    fires = [
        model.get_submodule(door.layer).quantizers.get_submodule(door.tensor).guard_count.item() for door in rows[0]
    ]
    if scaling == "guarded":
        assert [one.guard_fires for one in outcome.tensors] == fires
        assert sum(fires) > 0
    else:
        inverses = torch.where(scales > 0, scales.reciprocal(), 0.0)
        assert torch.equal(inverses, torch.tensor(seen))


def used_scale_inv(output: Any) -> float:
    operand = next(o for o in output if isinstance(o, QuantizedTensor))
    return operand.scale_inv.item()


# --- ranking and words ------------------------------------------------------------------------------------------------


def test_ranked_by_clips_then_lost_bits_and_what_nothing_beats_is_marked() -> None:
    recording = Recording(
        tuple(RecordedTensor(f"l{i}", "input", E4M3) for i in range(4)), tuple(range(80)), wandering(80, 4)
    )
    outcomes = replay(recording).outcomes
    assert {o.setting for o in outcomes} == set(DEFAULT_SETTINGS)
    keys = [(o.total.clipped, o.total.lost_bits_mean) for o in outcomes]
    assert keys == sorted(keys)
    assert keys[0] != keys[-1]
    for outcome, (clipped, lost) in zip(outcomes, keys, strict=True):
        beaten = any(c <= clipped and m <= lost and (c, m) != (clipped, lost) for c, m in keys)
        assert outcome.unbeaten is not beaten
    assert outcomes[0].unbeaten


def test_default_settings_cover_both_algorithms_without_repeating_one() -> None:
    """With L = 1 the largest and the most recent are the same amax."""
    assert {s.amax_history_len for s in DEFAULT_SETTINGS} == {1, 4, 16, 64, 256, 1024}
    assert {s.margin for s in DEFAULT_SETTINGS} == {0, 1, 2, 3}
    recording = Recording.of({"fc.input": ("E4M3", wandering(50, 2)[:, 0].tolist())})
    a, b = (replay(recording, [Setting(1, algorithm)]).outcomes[0] for algorithm in ("max", "most_recent"))
    assert a.total == b.total


def test_the_runs_own_setting_is_replayed_and_named() -> None:
    """E4M3, amax doubles once: most_recent clips that step, a margin of 1 does not and costs 1 bit in the others."""
    spec = QuantizationSpec(E4M3, scaling="delayed", amax_history_len=7)
    recording = Recording(
        (RecordedTensor.of("fc", "input", spec),), (1, 2, 3, 4), torch.tensor([[1.0], [2.0], [2.0], [2.0]])
    )
    found = replay(recording, [Setting(1, "most_recent", 1)])
    assert found.own is not None
    assert found.own.setting == Setting(7, "max", 0)
    assert found.advice() == (
        "most_recent, margin 1 would have clipped 0 of 4 casts (4 steps) and lost 0.8 bits on average; the run's own "
        "L=7, max, margin 0 clipped 1 and lost 0.0 bits; guarded, it would take the current scale in 1."
    )
    assert str(found).splitlines()[2].endswith("<- the run's own")
    steady = Recording(recording.tensors, (1, 2), torch.ones(2, 1))
    assert replay(steady, [Setting(1, "most_recent", 1)]).advice() == (
        "No setting here beats the run's own: L=7, max, margin 0 clipped 0 of 2 casts (2 steps) and lost 0.0 bits on "
        "average; guarded, it would take the current scale in 0."
    )


def test_advice_says_so_where_there_is_no_single_setting() -> None:
    specs = [QuantizationSpec(E4M3, scaling="delayed", margin=margin) for margin in (0, 1)]
    tensors = tuple(RecordedTensor.of(f"l{i}", "input", spec) for i, spec in enumerate(specs))
    mixed = Recording(tensors, (1,), torch.ones(1, 2))
    assert replay(mixed).own is None
    assert replay(mixed).advice().endswith("the run's own settings differ from tensor to tensor.")
    assert replay(Recording.of({"a.input": ("E4M3", [1.0])})).advice().endswith("the run's own settings are not known.")


def test_to_dict_is_json_and_names_every_tensor() -> None:
    recording = Recording.of({"fc1.input": ("E4M3", [1.0, 4.0]), "fc2.grad_output": ("E5M2", [0.0, 0.0])})
    values = json.loads(json.dumps(replay(recording).to_dict(), allow_nan=False))
    assert len(values["outcomes"]) == len(DEFAULT_SETTINGS)
    first = values["outcomes"][0]["tensors"]
    assert [(t["layer"], t["tensor"], t["format"], t["casts"]) for t in first] == [
        ("fc1", "input", "E4M3", 2),
        ("fc2", "grad_output", "E5M2", 0),
    ]


def test_nothing_to_replay_is_refused() -> None:
    with pytest.raises(ValueError, match="the recording has no cast"):
        replay(Recording.of({"fc.input": ("E4M3", [0.0, 0.0])}))
    with pytest.raises(ValueError, match="got no settings"):
        replay(Recording.of({"fc.input": ("E4M3", [1.0])}), [])
