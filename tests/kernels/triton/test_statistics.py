"""The slot that a GPU fills against `measure`: counts equal, sums to a derived bound; on a GPU with -m gpu."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import ottava
from ottava.kernels.triton.statistics import fill_slot, new_slot, read_slot, supports_statistics
from ottava.measure.tally import EXPONENT_BINS, Tally, tile_fields
from ottava.measure.walk import measure
from ottava.numerics.formats import BF16, E2M1, E4M3, E5M2
from ottava.numerics.scaling import BLOCK_1X16, BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, PER_ROW
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from triton_mode import DEVICE, ON_GPU, never_waits, with_triton

pytestmark = with_triton()

SPECS = [
    QuantizationSpec(E4M3),
    QuantizationSpec(E5M2, PER_ROW),
    QuantizationSpec(E4M3, BLOCK_1X128),
    QuantizationSpec(E4M3, BLOCK_128X128, "pow2"),
    QuantizationSpec(E4M3, BLOCK_1X32, "e8m0"),
    QuantizationSpec(E2M1, BLOCK_1X32, "e8m0_floor"),
    QuantizationSpec(E2M1, BLOCK_1X16, "e4m3"),
]
NUMBERS, FIELDS = tile_fields("numbers"), tile_fields("exponents")
COUNTS = tuple(name for name in NUMBERS if name.startswith("n"))
SUMS = ("sx", "sabs", "sxx", "sx4", "see", "sxe", "srel")
EXACT = ("amax", "amin", "max_error")


def cast(x: Tensor, spec: QuantizationSpec, scale: float | None = None) -> QuantizedTensor:
    return ottava.quantize(x, spec, scale=None if scale is None else torch.tensor(scale))


def filled(x: Tensor, x_q: QuantizedTensor, *, every: int = 1, phase: int = 0, on: int = 1) -> dict[str, Any]:
    slot = new_slot(DEVICE, FIELDS)
    fill(slot, x, x_q, every, phase, on)
    return read_slot(slot)


def test_a_slot_without_the_histogram_has_the_same_numbers() -> None:
    """It is that much shorter."""
    x = torch.randn(70, 300)
    x_q = cast(x, QuantizationSpec(E4M3))
    slot = new_slot(DEVICE, NUMBERS)
    fill(slot, x, x_q, 1, 0)
    assert len(slot) == len(NUMBERS)
    truth = filled(x, x_q)
    del truth["exponents"]
    assert read_slot(slot) == truth


def fill(slot: Tensor, x: Tensor, x_q: QuantizedTensor, every: int, phase: int, on: int = 1) -> None:
    there = replace(x_q, data=x_q.data.to(DEVICE), scale_inv=x_q.scale_inv.to(DEVICE))
    where, switch = torch.tensor(phase, device=DEVICE), torch.tensor(on, dtype=torch.int32, device=DEVICE)
    fill_slot(slot, x.to(DEVICE), there, every=every, phase=where, on=switch)


def check(seen: dict[str, Any], truth: Tally, x: Tensor) -> None:
    """Counts, extremes and the histogram are equal.

    `measure` sums a row in fp32, in some order: n terms are off by at most n * 2**-24 of the sum of their magnitudes,
    and each term, a product of up to four rounded factors and a quotient, by four more roundings. fp64 adds nothing.
    """
    for name in (*COUNTS, *EXACT):
        assert seen[name] == getattr(truth, name), name
    assert (seen["exponents"] == truth.exponents).all()
    rounding = (x.shape[1] + 4) * 2.0**-24
    magnitudes = {"sx": truth.sabs, "sxe": math.sqrt(truth.sxx * truth.see)}
    for name in SUMS:
        wanted = getattr(truth, name)
        assert abs(seen[name] - wanted) <= rounding * (1 + rounding) * magnitudes.get(name, wanted), name


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec, dtype", zip(SPECS, itertools.cycle((torch.bfloat16, torch.float32))), ids=str)
def test_a_slot_of_all_tiles_is_what_measure_says(spec: QuantizationSpec, dtype: torch.dtype) -> None:
    """Ragged tiles, ten decades of magnitudes, zeros, infinities and NaN."""
    x = (torch.randn(70, 300) * torch.exp(torch.randn(70, 300) * 3)).to(dtype)
    x[3, 5], x[9, 100], x[20, 7], x[21], x[24:30, 32:64] = float("nan"), float("inf"), -float("inf"), 0.0, 0.0
    x[50:52] *= 1e-9  # scales in E4M3 underflow there: lost, not clipped
    x_q = cast(x, spec)
    check(filled(x, x_q), measure(x, x_q), x)


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e-6])
@pytest.mark.parametrize("spec", [QuantizationSpec(E4M3, scaling="delayed"), QuantizationSpec(E5M2, scaling="delayed")])
def test_clipping_and_flushing_are_counted(spec: QuantizationSpec, scale: float) -> None:
    """A predicted scale that is far too large, or far too small; ties at the top are not clipped."""
    x = torch.randn(40, 130) * 30
    x[0, 0] = (spec.format.max + math.ldexp(spec.format.eps, spec.format.emax) / 2) / scale
    x_q = cast(x, spec, scale)
    truth = measure(x, x_q)
    check(filled(x, x_q), truth, x)
    assert scale == 1.0 or truth.n_overflow + truth.n_underflow > 1000


def test_magnitudes_far_from_one() -> None:
    """Gradients of 1e-30 and activations of 1e30: fourth powers leave fp32 and not the slot."""
    for size in (1e-30, 1e30):
        x = torch.randn(20, 40) * size
        x_q = cast(x, QuantizationSpec(E5M2))
        check(filled(x, x_q), measure(x, x_q), x)


@pytest.mark.parametrize("layout", ["x.t()", "codes.t()", "strided"])
def test_layouts_do_not_matter(layout: str) -> None:
    """x and its codes lie as they lie."""
    x = torch.randn(90, 70)
    spec = QuantizationSpec(E4M3, PER_ROW)
    if layout == "x.t()":
        x = x.t()
    if layout == "strided":
        x = torch.randn(90, 140)[:, ::2]
    x_q = cast(x, spec)
    if layout == "codes.t()":
        x_q = replace(x_q, data=x_q.data.t().contiguous().t())
    check(filled(x, x_q), measure(x, x_q), x)


# --- samples ---------------------------------------------------------------------------------------------------------


def test_the_phases_together_are_the_whole() -> None:
    """Each tile is in one of them; beyond `every` they begin again; the samples differ."""
    x = torch.randn(70, 400)
    x_q = cast(x, QuantizationSpec(E4M3))
    slot = new_slot(DEVICE, FIELDS)
    parts = []
    for phase in range(3, 6):
        fill(slot, x, x_q, 3, phase)
        parts.append(filled(x, x_q, every=3, phase=phase))
    check(read_slot(slot), replace(measure(x, x_q), n_total=3.0 * x.numel(), n_casts=3.0), x)
    assert sum(part["n"] for part in parts) == x.numel()
    assert len({part["sx"] for part in parts}) == 3


def test_a_sample_is_those_tiles() -> None:
    """Tiles of 16 x 128 are numbered along rows: 3 x 2 of them, of which 1 and 4 are looked at."""
    x = torch.randn(48, 256)
    x_q = cast(x, QuantizationSpec(E4M3))
    mine = torch.zeros_like(x, dtype=torch.bool)
    mine[0:16, 128:], mine[32:48, 0:128] = True, True
    seen = filled(x, x_q, every=3, phase=1)
    assert seen["n"] == int(mine.sum())
    assert seen["amax"] == float(x[mine].abs().max())
    assert seen["sx"] == pytest.approx(float(x[mine].double().sum()), abs=1e-9)


def test_off_is_off() -> None:
    """The flag is on the device: nothing is written."""
    x = torch.randn(20, 30)
    slot = new_slot(DEVICE, FIELDS)
    fill(slot, x, cast(x, QuantizationSpec(E4M3)), 1, 0, on=0)
    assert torch.equal(slot, new_slot(DEVICE, FIELDS))


def test_fields_and_bins_are_those_of_a_tally() -> None:
    """A slot read is keywords of a `Tally`, and merges as one."""
    assert len(new_slot("cpu", FIELDS)) == len(NUMBERS) + EXPONENT_BINS
    empty = Tally(**read_slot(new_slot("cpu", FIELDS)))
    assert empty + empty == empty


# --- refusals, and what only a device shows --------------------------------------------------------------------------


def test_refusals_say_why() -> None:
    x = torch.ones(4, 8)
    x_q = cast(x, QuantizationSpec(E4M3))
    with pytest.raises(ValueError, match=r"fill_slot: every is 0; needs 1 \(each tile\) or more"):
        fill_slot(new_slot("cpu", FIELDS), x, x_q, every=0, phase=torch.tensor(0), on=torch.tensor(1))
    with FakeTensorMode():
        there = torch.empty(4, 8, device="cuda")
        wide = replace(x_q, spec=QuantizationSpec(BF16))
        assert supports_statistics(there, wide) == "triton: decodes E4M3, E5M2, E2M1, E2M3, E3M2; got BF16"
        assert supports_statistics(torch.empty(0, 8, device="cuda"), x_q) == "triton: an empty tensor"


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_a_graph_goes_on_rotating() -> None:
    """Captured once, without a wait: the phase and the flag are read at each replay."""
    x = torch.randn(256, 512, device="cuda")
    x_q = ottava.quantize(x, QuantizationSpec(E4M3))
    slot, phase = new_slot(DEVICE, FIELDS), torch.zeros((), dtype=torch.int64, device="cuda")
    on = torch.ones((), dtype=torch.int32, device="cuda")
    fill_slot(slot, x, x_q, every=4, phase=phase, on=on)
    with never_waits():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fill_slot(slot, x, x_q, every=4, phase=phase, on=on)
            phase.add_(1)
    slot.copy_(new_slot(DEVICE, FIELDS))
    for _ in range(4):
        graph.replay()
    on.zero_()
    graph.replay()
    assert read_slot(slot)["n"] == x.numel()
