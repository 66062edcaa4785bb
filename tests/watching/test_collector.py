"""What a step's casts become: tallies of real casts, simulated ones, and amaxes."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import ottava
from ottava.measure import walk as measure_module
from ottava.measure.tally import Tally
from ottava.measure.walk import measure
from ottava.numerics.scaling import Granularity
from ottava.numerics.tensor import QuantizationSpec
from ottava.record.schema import SlotKey
from ottava.watching import collector as collector_module
from ottava.watching.collector import Collector, cells
from ottava.watching.config import WatchConfig


def collector(**settings: object) -> Collector:
    made = Collector(WatchConfig(**({"sample": 1} | settings)))  # type: ignore[arg-type]
    made.looking = True
    return made


def by_cast(seen: dict[SlotKey, Tally]) -> dict[tuple[str, str, str], Tally]:
    return {(key.layer, key.tensor, key.direction): tally for key, tally in seen.items()}


@pytest.mark.parametrize("recipe", sorted(ottava.RECIPES))
@pytest.mark.parametrize("tensor", ["input", "weight", "grad_output"])
def test_a_simulated_cast_is_the_cast(recipe: str, tensor: str) -> None:
    """For every recipe: what `simulate` measures is what `quantize` gives, along rows and along columns."""
    torch.manual_seed(0)
    x = torch.randn(96, 160).bfloat16()
    made = collector(recipes=recipe)
    random = torch.get_rng_state()
    made.simulate("fc", tensor, x)
    assert torch.equal(torch.get_rng_state(), random)
    seen = by_cast(made.drain()[0])
    casts = cells(ottava.RECIPES[recipe], tensor)
    assert {direction for _, _, direction in seen} == {direction for direction, _ in casts}
    for direction, spec in casts:
        matrix = x if direction == "row" else x.t()
        torch.set_rng_state(random)
        x_q = ottava.quantize(matrix, dataclasses.replace(spec, scaling="current"))
        expected = measure(x_q.transformed(matrix), x_q)
        got = seen["fc", tensor, direction]
        if spec.rounding == "stochastic":
            assert got.n == expected.n
        elif spec.predicted:
            assert (got.see, got.n_underflow, got.n_predicted) == (expected.see, expected.n_underflow, 1)
        else:
            assert got == expected


def test_micro_batches_add_up_and_weights_count_once() -> None:
    """Two of them: twice the elements of the input, once those of the weight."""
    made = collector()
    for _ in range(2):
        for tensor in ("input", "weight"):
            if made.wants("fc", tensor):
                made.simulate("fc", tensor, torch.randn(32, 32))
    seen = by_cast(made.drain()[0])
    assert (seen["fc", "input", "row"].n, seen["fc", "weight", "row"].n) == (2048, 1024)
    assert (seen["fc", "input", "row"].n_casts, seen["fc", "weight", "row"].n_casts) == (2, 1)
    assert made.wants("fc", "weight")  # a new step


def test_sampling_measures_some_rows_and_the_amax_of_all() -> None:
    """Others at every look; scale and amax are those of the whole tensor."""
    torch.manual_seed(0)
    x = torch.randn(512, 64)
    x[300, 5] = 1000.0
    for look in range(16):
        made = collector(sample=16)
        made.look = look
        made.simulate("fc", "input", x)
        ((key, tally),) = made.drain()[0].items()
        rows = torch.arange(look % 4 * 128 + look // 4, look % 4 * 128 + 128, 4)
        whole = ottava.quantize(x, QuantizationSpec(ottava.E4M3))
        assert key.granularity == "tensor"
        assert (tally.n, tally.n_total, tally.amax) == (32 * 64, x.numel(), 1000.0)
        assert tally.scale_max == pytest.approx(448 / 1000)
        error = (x - whole.dequantize())[rows].double().square().sum()
        assert tally.see == pytest.approx(float(error), rel=1e-6)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"])
def test_a_sample_of_a_real_cast_is_that_part_of_it(recipe: str) -> None:
    """Rows of codes come with the scales of their blocks."""
    torch.manual_seed(0)
    x = torch.randn(512, 256) * torch.logspace(-3, 3, 512)[:, None]
    spec = ottava.RECIPES[recipe].fprop.rhs
    assert spec is not None
    x_q = ottava.quantize(x, spec)
    made = collector(sample=4)
    made.look = 2
    made.cast("fc", "weight", "row", x, x_q, source="door", recipe=recipe)
    ((_, tally),) = made.drain()[0].items()
    error = (x - x_q.dequantize())[256:384].double()
    assert tally.see == pytest.approx(float(error.square().sum()), rel=1e-6)


def test_simulated_delayed_scaling_predicts_from_earlier_steps() -> None:
    """The amaxes of the steps before make the scale; the first step takes its own."""
    made = collector(recipes="delayed")
    errors = []
    for amax in (1.0, 4.0, 2.0):
        x = torch.full((16, 32), amax)
        made.simulate("fc", "input", x)
        ((_, tally),) = made.drain()[0].items()
        errors.append(tally.scale_error_max)
    assert errors == pytest.approx([0.0, 2.0, -1.0])  # at 4 the scale was for 1: two octaves too large


def test_light_steps_note_amaxes_only() -> None:
    """Without a look: the largest of the micro-batches, and inf where an element was."""
    made = collector()
    made.looking = False
    for amax in (1.0, 3.0, 2.0):
        made.simulate("fc", "input", torch.full((4, 4), -amax))
    made.simulate("fc", "grad_output", torch.tensor([[math.inf, 1.0]]))
    tallies, light = made.drain()
    assert tallies == {}
    assert [(key.tensor, amax) for key, amax in zip(light.keys, light.amax.tolist(), strict=True)] == [
        ("input", 3.0),
        ("grad_output", math.inf),
    ]
    assert made.drain()[1].keys == ()


def test_light_steps_know_the_scale_of_a_real_cast() -> None:
    """Clipping can be told from it afterwards."""
    made = collector()
    made.looking = False
    x = torch.full((4, 4), 2.0)
    x_q = ottava.quantize(x, QuantizationSpec(ottava.E4M3))
    made.cast("fc", "input", "row", x, x_q, source="door", recipe="tensorwise")
    assert made.drain()[1].scale_inv.tolist() == [pytest.approx(2 / 448)]


@pytest.mark.parametrize("looking", [True, False])
@pytest.mark.parametrize("spoil", [None, math.inf, math.nan])
def test_what_a_cast_found_is_not_read_again(
    looking: bool, spoil: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Amaxes and tallies are those of a survey; it is made where elements are not finite, for a cast does not count
    them, and of weights, whose kept cast may be of an earlier one."""
    x = torch.randn(32, 64)
    if spoil is not None:
        x[3, 5] = x[9, 9] = spoil
    surveyed = []

    def survey(x: torch.Tensor, *args: object, **settings: bool) -> torch.Tensor:
        surveyed.append(x)
        return measure_module.survey(x, *args, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(collector_module, "survey", survey)
    for block, tensor, reads in (
        ("tensor", "input", spoil is not None),
        ("row", "input", spoil is not None),
        ("1x32", "grad_output", spoil is not None),
        ("tensor", "weight", True),
    ):
        x_q = ottava.quantize(x, QuantizationSpec(ottava.E4M3, Granularity.parse(block)))
        seen = []
        for known in (x_q, dataclasses.replace(x_q, amax=None)):
            made = collector()
            made.looking = looking
            surveyed.clear()
            made.cast("fc", tensor, "row", x, known, source="door", recipe="tensorwise")
            assert bool(surveyed) == (reads or known is not x_q)
            tallies, light = made.drain()
            seen.append((list(tallies.values()), light.keys, light.amax.nan_to_num(-1).tolist()))
        assert seen[0] == seen[1]
        assert not looking or seen[0][0][0].n_nonfinite == (0 if spoil is None else 2)


def test_only_what_is_asked_for_is_wanted() -> None:
    """Layers by pattern, tensors by name; nothing at all in a step that nobody looks at, if amaxes are off."""
    made = collector(layers="*.fc2", tensors="X", light=False)
    assert made.wants("0.fc2", "input")
    assert not made.wants("0.fc1", "input")
    assert not made.wants("0.fc2", "weight")
    made.looking = False
    assert not made.wants("0.fc2", "input")


def test_an_empty_tensor_is_no_cast() -> None:
    """An expert without tokens."""
    made = collector()
    made.simulate("fc", "input", torch.empty(0, 16))
    assert made.drain()[0] == {}
