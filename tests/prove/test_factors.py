"""Kernels that are wrong in two respects at once, or that keep something: real ones, small, and what `certify` says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ottava.kernels.reference import quantize
from ottava.numerics import rounding
from ottava.numerics.formats import E4M3, get_format
from ottava.prove import judge
from ottava.prove.adapters import KernelAdapter
from ottava.prove.certificate import certify
from ottava.prove.codes import on_grid, significant
from ottava.prove.factors import alone, factored
from ottava.prove.ready import load

Pair = tuple[Tensor, Tensor]


def said(kind: str, function: Any, count: int = 64, **what: Any) -> str:
    found = certify(KernelAdapter("here", function, kind, what), count=count)
    assert found.verdict == "wrong", str(found)
    assert found.explained is not None
    return found.explained["sentence"]


def spec_of(recipe: str) -> Any:
    return judge.cast_spec({"recipe": recipe, "operand": "x"})


def signed_tensor(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """NVFP4, whose tensor's factor looks at x, not at its magnitude."""
    spec, fmt = spec_of("nvfp4"), get_format("e2m1")
    amax = judge.block_amax(x, spec.granularity)
    top = x.double().nan_to_num(0.0, 0.0, 0.0).amax() if x.numel() else torch.zeros(())
    whole = torch.where(top > 0, top, 1.0) / (6 * 448)
    scale = torch.where(amax.isfinite(), on_grid(amax / 6 / whole, E4M3) * whole, math.nan)
    each = judge.spread(torch.where(scale > 0, scale, 1.0), spec, (x.shape[0], x.shape[1])) if x.numel() else 1.0
    return rounding.encode(on_grid(x.double() / each, fmt).float(), fmt), scale.float()


def tail_of_columns(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """Columns beyond the last whole 16 are neither seen nor written."""
    whole, seen = x.shape[1] // 16 * 16, x.clone()
    seen[:, whole:] = 0
    made = quantize(seen, spec_of("blockwise"))
    data.view(torch.uint8)[:, :whole] = made.data.view(torch.uint8)[:, :whole]
    return data, scale_inv.copy_(judge.stored(made.scale_inv, spec_of("blockwise")))


def strides_of_x(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    made = quantize(x, spec_of("rowwise"))
    turned = x.stride(0) == 1 and x.stride(1) > 1
    codes = made.data.view(torch.uint8)
    codes = codes.t().reshape(x.shape) if turned else codes
    return codes.view(made.data.dtype), judge.stored(made.scale_inv, spec_of("rowwise"))


def zeros_divided(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    made, spec = quantize(x, spec_of("blockwise")), spec_of("blockwise")
    shape = (x.shape[0], x.shape[1])
    zero = judge.spread(judge.block_amax(x, spec.granularity) == 0, spec, shape) if x.numel() else x.bool()
    return torch.where(zero, 0x7F, made.data.view(torch.uint8)).view(made.data.dtype), judge.stored(
        made.scale_inv, spec
    )


def nan_lost(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """FP4 has no code of NaN, so the scale of its block must show it."""
    made = quantize(torch.where(x.isnan(), 0.0, x), spec_of("mxfp4"))
    return made.data, judge.stored(made.scale_inv, spec_of("mxfp4"))


def late_threshold(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
    """The exponent of a block of MXFP4 grows from 1.75 times a power of two on."""
    spec, fmt = spec_of("mxfp4"), get_format("e2m1")
    amax = judge.block_amax(x, spec.granularity)
    part, power = torch.frexp(torch.where((amax > 0) & amax.isfinite(), amax, 4.0))
    scale = torch.ldexp(torch.ones_like(part), (power - 3 + (part >= 0.875)).clamp(-127, 127))
    each = judge.spread(scale, spec, (x.shape[0], x.shape[1])) if x.numel() else 1.0
    stored = torch.where(amax.isfinite(), scale, math.nan)
    return rounding.encode(on_grid(x.double() / each, fmt).float(), fmt), judge.stored(stored.float(), spec)


@pytest.mark.parametrize(
    ("recipe", "kernel", "expected"),
    (
        ("mxfp4", nan_lost, "NaN is read as zero, and its block looks like any other"),
        ("mxfp4", late_threshold, "one more where amax is at least 1.75 times a power of two"),
        ("nvfp4", signed_tensor, "not at its magnitude. It is so for the tensor's factor of the scale alone"),
        ("blockwise", tail_of_columns, "beyond the last whole 16. It does not write columns beyond the last whole 16"),
        ("rowwise", strides_of_x, "data is written with the strides of x"),
        ("blockwise", zeros_divided, "its scale divides by an amax of zero"),
    ),
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_cast_is_wrong_in_one_respect_or_two(recipe: str, kernel: Any, expected: str) -> None:
    assert expected in said("cast", kernel, recipe=recipe, operand="x")


def test_a_block_with_nan_has_no_right_scale() -> None:
    """A cast whose amax leaves NaN out is right while NaN stays NaN: no knob is turned when a result is judged."""

    def cast(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
        made = quantize(x.nan_to_num(0.0, math.inf, -math.inf), spec_of("rowwise"))
        codes = torch.where(x.isnan(), 0x7F, made.data.view(torch.uint8))
        return codes.view(made.data.dtype), judge.stored(made.scale_inv, spec_of("rowwise"))

    assert certify(KernelAdapter("here", cast, "cast", {"recipe": "rowwise", "operand": "x"}), count=64).good


@pytest.mark.parametrize(("nudge", "good"), ((1.0, True), (1 - 2.0**-16, False)), ids=("log2", "further"))
def test_an_amax_that_log2_takes_for_a_threshold_may_count_as_that(nudge: float, good: bool) -> None:
    """torchao's rule: floor(log2(448 / amax)) in FP32; amaxes further above a threshold must not."""

    def cast(x: Tensor, data: Tensor, scale_inv: Tensor) -> Pair:
        spec = spec_of("rowwise")
        amax = judge.block_amax(x, spec.granularity)
        known = (amax > 0) & amax.isfinite()
        scale = torch.where(known, torch.exp2(torch.log2((448 / (nudge * amax)).float()).floor().clamp(max=127)), 1.0)
        codes = rounding.encode(on_grid(x.double() * scale, E4M3).float(), E4M3)
        return codes, judge.stored(1 / scale, spec)

    assert certify(KernelAdapter("here", cast, "cast", {"recipe": "rowwise", "operand": "x"}), count=100).good is good


def gemm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    lhs, rhs = judge.gemm_specs({"recipe": "blockwise_fp32"})
    return out.copy_(judge.decoded(a, scale_a, lhs) @ judge.decoded(b, scale_b, rhs).t())


def in_place(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """The second 128 rows of each 256 also have the scales of the first."""
    scale = scale_a.clone()
    for start in range(128, len(a), 256):
        scale[start : start + 128] *= scale_a[start - 128 : start][: len(a) - start]
    return gemm(a, b, scale, scale_b, out)


def padded(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    m, k = scale_a.shape
    place = torch.arange(m)[:, None] * (-(-k // 8) * 8) + torch.arange(k)
    return gemm(a, b, scale_a.flatten()[place.clamp(max=max(m * k - 1, 0))] if m * k else scale_a, scale_b, out)


def short_sums(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    lhs, rhs = judge.gemm_specs({"recipe": "blockwise_fp32"})
    total = torch.zeros(out.shape, dtype=torch.float64)
    x, y = judge.decoded(a, scale_a, lhs), judge.decoded(b, scale_b, rhs)
    for left, right in zip(x.split(32, 1), y.split(32, 1), strict=True):
        total = significant(total + left @ right.t(), -14)
    return out.copy_(total)


def halves(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """The second half of K counts blocks of 128 from its own start."""
    k, half = a.shape[1], a.shape[1] // 2
    at = torch.cat([torch.arange(half) // 128, half // 128 + torch.arange(k - half) // 128])
    rows = torch.arange(len(b)) // 128
    x, y = (v.float().double() * s.double() for v, s in ((a, scale_a[:, at]), (b, scale_b[rows][:, at])))
    return out.copy_(x @ y.t())


def added(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    out[: len(out) // 16 * 16] = 0
    return out.add_(gemm(a, b, scale_a, scale_b, torch.empty_like(out)))


def unwritten(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    whole = len(out) // 16 * 16
    out[:whole] = gemm(a, b, scale_a, scale_b, torch.empty_like(out))[:whole]
    return out


@pytest.mark.parametrize(
    ("kernel", "expected"),
    (
        (in_place, "a tile of 128 rows also has the scales of the same place in the tiles before it, anew after two"),
        (
            halves,
            "K is split in 2, and each part counts its blocks from its own start, which has the scale",
        ),
        (padded, "Scales are read with rows padded to a multiple of 8 blocks: scale_inv_a"),
        (short_sums, "Sums are cut off to 14 bits after each 32 products"),
        (added, "it adds to what a buffer holds"),
        (unwritten, "out is not written in rows beyond the last whole 16"),
    ),
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_gemm_reads_its_scales_elsewhere_or_its_sums_are_short(kernel: Any, expected: str) -> None:
    assert expected in said("gemm", kernel, recipe="blockwise_fp32", out="float32")


def test_a_code_that_ends_too_early_is_said_by_its_numbers() -> None:
    """No exponent bias for magnitudes from 248 on, and no format that has no part in it."""

    def early(x: Tensor) -> Tensor:
        y = on_grid(x, E4M3)
        return rounding.encode(torch.where(y.abs() >= 256, y.sign() * 448, y).float(), E4M3)

    def flushed(x: Tensor) -> Tensor:
        return rounding.encode(torch.where(x.abs().double() < 2.0**-9, 0 * x, x), E4M3)

    assert "Numbers whose results are 256 or more become 448" in said("encode", early, format="e4m3")
    assert "Numbers from half of the smallest number on" in said("encode", flushed, format="e4m3")


def test_random_rounding_that_loses_the_carry() -> None:
    def lost(x: Tensor) -> Tensor:
        low, high = on_grid(x, E4M3, "truncate"), on_grid(x, E4M3, "away", carry="lost")
        drawn = torch.where(torch.rand(x.shape) < 0.5, low, high)
        return rounding.encode(torch.where(x.isfinite(), drawn, x.double()).float(), E4M3)

    assert "begins at 0, and the exponent stays" in said("encode", lost, format="e4m3", rounding="stochastic")


@pytest.mark.parametrize("end", (0.5, 0.0625))
def test_the_share_that_random_rounding_adds_is_measured(end: float) -> None:
    def drawn(x: Tensor) -> Tensor:
        low, high = on_grid(x, E4M3, "truncate"), on_grid(x, E4M3, "away")
        share = ((x - low) / torch.where(high == low, 1.0, high - low)).nan_to_num(0.0)
        return rounding.encode(torch.where(share + end * torch.rand(x.shape) >= 1, high, low).float(), E4M3)

    assert f"reaches from 0 to {end:g} of a step" in said("encode", drawn, format="e4m3", rounding="stochastic")


def test_of_two_operands_that_give_the_same_both_are_named() -> None:
    def swapped(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
        order = torch.arange(b.shape[1]) ^ 1
        turned = b.view(torch.uint8)[:, order.clamp(max=max(b.shape[1] - 1, 0))].view(b.dtype)
        return out.copy_((a.double() * scale_a) @ (turned.double() * scale_b).t())

    text = said("gemm", swapped, recipe="tensorwise", out="float32")
    assert "the codes of a." in text
    assert "So does this: Each two neighbours along K are swapped, as nibbles of a byte: the codes of b" in text


def test_a_backward_that_sees_another_mask_is_told_from_its_forward() -> None:
    def late(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        x, y, z, g = (t.double() for t in (q, k, v, grad))
        scale = q.shape[-1] ** -0.5
        scores, ones = x @ y.mT * scale, torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool)
        total = scores.masked_fill(ones.triu(1), -math.inf).logsumexp(-1, keepdim=True)
        p = (scores - total).exp()
        o, p = p.masked_fill(ones.triu(1), 0) @ z, p.masked_fill(ones.triu(2), 0)
        ds = p * (g @ z.mT - (g * o).sum(-1, keepdim=True)) * scale
        return tuple(t.to(q.dtype) for t in (o, ds @ y, ds.mT @ x, p.mT @ g))

    text = said("attention", late, count=40, recipe="bf16", causal=True, dtype="float32")
    assert "The backward sees 1 key too many; the forward is right" in text


def test_two_faults_of_an_optimizer_are_found_together() -> None:
    """Both moments in BF16, which no storage of ottava's rounds so."""

    def step(parameter: Tensor, grad: Tensor, state: dict[str, Any], number: int) -> None:
        g = grad.double()
        for name, beta, new in (("m", 0.9, g), ("v", 0.999, g * g)):
            kept = state.get(name, torch.zeros_like(parameter)).double() * beta + (1 - beta) * new
            state[name] = kept.float().bfloat16().float()
        m, v = state["m"].double() / (1 - 0.9**number), state["v"].double() / (1 - 0.999**number)
        parameter.copy_(parameter.double() * (1 - 1e-2 * 0.1) - 1e-2 * m / (v.sqrt() + 1e-8))

    text = said("optimizer", step, count=24, lr=1e-2, weight_decay=0.1, dtype="float32")
    assert "The first moment is rounded to BF16 before it is used. The second moment is rounded" in text


_KEEPS = """
import torch
from ottava.prove import adapter, judge
KEPT = {}
@adapter("linear", recipe="bf16", dtype="float32")
def cached(x, weight, grad):
    turned = KEPT.get(weight.shape, weight.t())  # by shape: which addresses come again is the heap's affair
    KEPT[weight.shape] = weight.t().clone()
    rows, dy = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return (x @ weight.t()).view(*x.shape[:-1], -1), (dy @ turned.t()).view(x.shape), dy.t() @ rows
@adapter("linear", recipe="bf16", dtype="float32")
def added(x, weight, grad):
    rows, dy = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    total = KEPT.setdefault(weight.shape, torch.zeros_like(weight))
    total += dy.t() @ rows
    return (x @ weight.t()).view(*x.shape[:-1], -1), (dy @ weight).view(x.shape), total.clone()
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    (("cached", "It uses the weight of the call before, but only in dx"), ("added", "dw is added to")),
    ids=("cached", "added"),
)
def test_what_a_layer_keeps_between_calls_is_named(tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / "keeps.py").write_text(_KEEPS, "utf-8")
    found = certify(load(f"{tmp_path / 'keeps.py'}:{name}"), count=40)
    assert found.explained is not None
    assert expected in found.explained["sentence"]


def test_factors_that_turn_the_same_are_not_put_together() -> None:
    """Every factor of a cast is one hypothesis, and a pair has the sentences of both."""
    single, pairs = [*alone()], [*factored("cast")]
    assert len({fault.sentence for fault in single}) == len(single)
    assert all(fault.kinds == ("cast",) for fault in (*[one for one in single if "backward" not in one.name], *pairs))
    assert {*factored("gemm")}
    assert not [*factored("linear")]
