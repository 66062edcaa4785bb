"""Casts by whatever kernel takes them: the reference's bits in every layout, what is refused, and torch's operators."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ottava
from kernels.operands import raw
from ottava.kernels import reference
from ottava.kernels.native import build as native_build
from ottava.numerics.formats import E4M3, E5M2
from ottava.numerics.scaling import BLOCK_1X16, BLOCK_1X128, BLOCK_128X128
from ottava.numerics.tensor import QuantizationSpec
from ottava.numerics.transforms import Hadamard, Mean, Smooth
from ottava.ops import quantize as casts
from ottava.ops.quantize import _draws, cast_both, quantize, refuse_turn, turn
from ottava.recipe import Recipe, get_recipe
from sweep import PAIRS, sweep

E4, E5 = QuantizationSpec(E4M3), QuantizationSpec(E5M2)
CONTRACTS = tuple(
    spec
    for spec in dict.fromkeys(replace(lhs, rounding="nearest_even") for lhs, _ in PAIRS.values())
    if spec.repeatable
)
"""Every left operand of a registered recipe, once; opcheck runs each twice and compares, so nothing is drawn."""


@sweep
def test_quantize_is_the_reference(spec: QuantizationSpec, dtype: torch.dtype) -> None:
    """On a CPU: the same codes and scales; and the amax that the cast saw."""
    x = torch.randn(130, 300).to(dtype)
    x_q, _, seen = cast_both(x, spec, None)
    assert x_q is not None
    assert seen is not None
    truth = reference.quantize(x, spec)
    assert torch.equal(raw(x_q), truth.data.view(torch.uint8))
    assert torch.equal(x_q.scale_inv, truth.scale_inv)
    assert torch.equal(seen, truth.amax)
    assert (x_q.dtype, x_q.spec) == (dtype, spec)
    assert x_q.amax is not None
    assert torch.equal(x_q.amax.max(), x.abs().max().float())
    assert not spec.granularity.transposes or x_q.t().amax is x_q.amax


@sweep
def test_codes_carry_no_gradient(spec: QuantizationSpec) -> None:
    """Gradients are the business of `functional`; a cast of a Parameter records nothing."""
    x_q, _, seen = cast_both(torch.randn(8, 128, requires_grad=True), spec, None)
    assert x_q is not None
    assert seen is not None
    assert not any(t.requires_grad for t in (x_q.data, x_q.scale_inv, seen, x_q.dequantize()))


@sweep(dtype=[torch.float64, torch.int32, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    """Said with the remedy."""
    with pytest.raises(TypeError, match=f"quantize: got {dtype}; needs float32, bfloat16 or float16"):
        quantize(torch.zeros(2, 2).to(dtype), E4)


@sweep
def test_both_casts_are_two_casts(spec: QuantizationSpec, dtype: torch.dtype) -> None:
    """Whoever makes them, at once or one by one, and where a plan is kept: the bits of x and of x.T cast alone."""
    plans: dict[object, casts.CastPlan] = {}
    for x in (torch.randn(130, 140).to(dtype), torch.randn(140, 130).to(dtype).t(), torch.randn(7, 1).to(dtype)):
        for kept in (None, plans, plans):
            row, col, seen = cast_both(x, spec, spec, plans=kept)
            assert row is not None
            assert col is not None
            assert seen is not None
            for operand, alone in ((row, quantize(x, spec)), (col, quantize(x.t(), spec))):
                assert torch.equal(raw(operand), raw(alone))
                assert torch.equal(operand.scale_inv, alone.scale_inv)
            assert torch.equal(seen, reference.quantize(x, spec).amax)


def test_plans_do_not_pile_up() -> None:
    """Lengths that change with every batch: what is kept stays small."""
    plans: dict[object, casts.CastPlan] = {}
    for rows in range(1, 100):
        cast_both(torch.ones(rows, 4), E4, None, plans=plans)
    assert len(plans) <= 32


@sweep(spec=[E4, QuantizationSpec(E4M3, BLOCK_128X128)])
def test_one_cast_serves_x_and_its_transpose(spec: QuantizationSpec) -> None:
    """Where they share their scales; the same bits, codes in one place, and an amax kept where `quantize` keeps it."""
    x = torch.randn(130, 140)
    if (reason := native_build.load("quantize", x.dtype).reason) != "":
        pytest.skip(reason)
    both, alone = cast_both(x, spec, spec), quantize(x, spec)
    assert both.row is not None
    assert both.col is not None
    assert torch.equal(raw(both.row), raw(alone))
    assert torch.equal(raw(both.col), raw(alone.t()))
    assert torch.equal(both.col.scale_inv, alone.scale_inv.t())
    assert both.row.data.data_ptr() == both.col.data.data_ptr()
    for operand in (both.row, both.col):
        assert (operand.amax is None) == (alone.amax is None)
        assert alone.amax is None or (operand.amax is not None and torch.equal(operand.amax, alone.amax))


@sweep(recipe=["tensorwise", "rowwise", "blockwise"])
def test_both_casts_as_one_operator_are_two_casts(recipe: str) -> None:
    """What compiled code runs: two casts where no kernel makes both; its fake agrees, nothing aliases."""
    cells, x = get_recipe(recipe), torch.randn(24, 40).bfloat16()
    for spec, spec_t in ((cells.fprop.lhs, cells.wgrad.rhs), (cells.fprop.rhs, cells.dgrad.rhs)):
        assert spec is not None
        assert spec_t is not None
        arguments = x, spec.key, spec_t.key, None
        torch.library.opcheck(torch.ops.ottava.quantize_both.default, arguments)
        data, scale_inv, amax, data_t, scale_inv_t = torch.ops.ottava.quantize_both(*arguments)
        (row, _, seen), col = cast_both(x, spec, None), quantize(x.t(), spec_t)
        assert row is not None
        assert seen is not None
        if scale_inv_t.numel() == 0:  # shared
            scale_inv_t = scale_inv.t()
        codes = ((data, row.data), (data_t, col.data))
        assert all(torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in codes)
        assert torch.equal(scale_inv, row.scale_inv)
        assert torch.equal(scale_inv_t, col.scale_inv)
        assert torch.equal(amax, seen)


# --- gemm ------------------------------------------------------------------------------------------------------------


@sweep(spec=CONTRACTS, view=["contiguous", "transposed", "strided", "one row", "one column", "one number", "empty"])
def test_the_quantize_operator_keeps_torchs_contract(spec: QuantizationSpec, view: str) -> None:
    """torch.library.opcheck: schema, fake kernel (shapes, dtypes, strides), autograd registration, AOT dispatch."""
    x = torch.randn(40, 130)
    x = {
        "contiguous": x,
        "transposed": x.t(),
        "strided": x[::2, 1::3],
        "one row": x[:1].t(),
        "one column": x[:, :1],
        "one number": x[:1, :1].t(),
        "empty": x[:0],
    }[view]
    torch.library.opcheck(torch.ops.ottava.quantize.default, (x, spec.key, None))
    strides = torch.ops.ottava.quantize(x, spec.key, None)[0].stride()
    assert strides == casts._promised(x, spec.key, None)[0].stride()  # also where a length of 1 makes one meaningless


# --- x.T from the codes of x ---


def test_a_turned_operand_is_the_cast_of_the_decoded_numbers(recipe: Recipe) -> None:
    """Where scales are powers of two: codes, scales and all; numbers clear of the subnormals do not change."""
    row, col = recipe.cells("input")
    if row is None or col is None or (reason := refuse_turn(row, col)) is not None:
        assert recipe.name not in ("rowwise", "blockwise", "mxfp8", "mxfp8_floor", "mxfp4"), reason
        return
    for rows, cols in ((1, 1), (40, 300), (129, 33), (0, 32)):
        x = (torch.randn(rows, cols) * torch.exp2(torch.randint(-3, 4, (rows, 1)))).bfloat16()
        x_q = quantize(x, row)
        turned, wanted = turn(x_q, col), quantize(x_q.dequantize(torch.float32).t(), col)
        assert torch.equal(turned.data.view(torch.uint8), wanted.data.view(torch.uint8))
        assert torch.equal(turned.scale_inv, wanted.scale_inv)
        assert turned.dtype == torch.bfloat16
        exact, got = x_q.dequantize(torch.float32).t(), turned.dequantize(torch.float32)
        scale = col.granularity.expand(turned.scale_inv, (cols, rows)) if x.numel() else turned.scale_inv
        fits = (
            exact.abs() <= col.format.max * scale
        )  # the OCP rule saturates what is near the top of a block, here as in a cast
        assert bool(fits.all()) or col.scale_format == "e8m0_floor"
        smallest = col.format.min_subnormal * scale
        assert bool(((got - exact).abs() <= smallest / 2)[fits].all())
        normal = (exact.abs() >= col.format.min_normal * scale) & fits
        assert torch.equal(got[normal], exact[normal])


def test_codes_are_turned_between_powers_of_two_alone() -> None:
    x_q = quantize(torch.ones(2, 2), QuantizationSpec(E4M3, BLOCK_1X128))
    with pytest.raises(ValueError, match=r"turn: fp32 scales are no powers of two.*quantize x\.T itself"):
        turn(x_q, QuantizationSpec(E4M3, BLOCK_1X128, "pow2"))
    pow2 = QuantizationSpec(E4M3, BLOCK_1X128, "pow2")
    assert refuse_turn(pow2, replace(pow2, format=E5M2)) == "x is cast to E4M3 and x.T to E5M2"
    tensor = QuantizationSpec(E4M3, scale_format="pow2")
    assert refuse_turn(tensor, tensor) is None
    for spec in (replace(tensor, rounding="stochastic"), replace(tensor, scaling="delayed")):
        assert "only x itself can be cast to" in str(refuse_turn(tensor, spec))
        assert "only x itself can be cast to" in str(refuse_turn(spec, tensor))


# --- casts in a graph ---

SPEC = QuantizationSpec(ottava.E2M1, BLOCK_1X16, "e4m3")


def test_operators_are_the_casts_of_eager_code() -> None:
    """Columns that need zeros, x.T, and numbers of the other operand; the fake agrees, and nothing aliases."""
    x = torch.randn(24, 40).bfloat16()
    for transform in (Hadamard(), Hadamard(32, 5, rounded=False), Mean(), Mean("columns"), Smooth()):
        spec = replace(SPEC, transform=transform)
        for matrix in (x, x.t()):
            torch.library.opcheck(torch.ops.ottava.quantize_behind.default, (matrix, spec.key, None))
            data, scale_inv, aside = torch.ops.ottava.quantize_behind(matrix, spec.key, None)
            alone = quantize(matrix, spec)
            assert torch.equal(data, alone.data)
            assert torch.equal(scale_inv, alone.scale_inv)
            assert aside.dim() == 1 if alone.aside is None else torch.equal(aside, alone.aside)
            if transform.paired and alone.aside is not None:
                met = torch.ops.ottava.quantize_behind(matrix, spec.key, aside)
                other = quantize(matrix, spec, beside=alone)
                assert torch.equal(met[0], other.data)
                assert torch.equal(met[2], other.aside)
    fresh = replace(SPEC, transform=Hadamard(16, "fresh"))
    aside = torch.ops.ottava.quantize_drawn(x, fresh.key, None)[2]
    again = torch.ops.ottava.quantize_drawn(x, fresh.key, aside)[2]
    assert torch.equal(aside, again)
    assert aside.data_ptr() != again.data_ptr()


def test_what_draws_is_two_nodes_of_a_graph() -> None:
    drawn = (replace(SPEC, rounding="stochastic"), replace(SPEC, transform=Hadamard(16, "fresh")))
    assert [_draws(spec.key) for spec in (SPEC, replace(SPEC, transform="mean"), *drawn)] == [False, False, True, True]
    assert torch.Tag.nondeterministic_seeded in torch.ops.ottava.quantize_drawn.default.tags
    assert torch.Tag.nondeterministic_seeded not in torch.ops.ottava.quantize_behind.default.tags
