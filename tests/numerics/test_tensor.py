"""Specs refuse what means nothing and survive JSON; quantized tensors hold codes, and nothing dispatches on them."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ottava.numerics.formats import E2M1, E2M3, E3M2, E4M3, E5M2, FORMATS, Format
from ottava.numerics.scaling import BLOCK_1X16, BLOCK_1X128, BLOCK_128X128, PER_ROW, Granularity, compute_scale
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor, refuse_pair
from ottava.numerics.transforms import Hadamard
from ottava.ops.quantize import quantize
from sweep import sweep

OPERANDS = [E4M3, E5M2, E2M1, E2M3, E3M2]

CHANGES: dict[str, Any] = {
    "format": E5M2,
    "granularity": BLOCK_1X16,
    "scale_format": "pow2",
    "scaling": "delayed",
    "margin": 1,
    "amax_history_len": 4,
    "amax_compute_algo": "most_recent",
    "bootstrap": False,
    "guard_bits": 2,
    "rounding": "stochastic",
    "transform": Hadamard(32, 1),
    "block_scale": "four_over_six",
}
"""Another value for every field."""

NVFP4 = QuantizationSpec(E2M1, BLOCK_1X16, "e4m3")
BASES = {"block_scale": NVFP4}
"""The spec to change, where that is not E4M3 per tensor."""

HISTORY_FIELDS = ("amax_history_len", "amax_compute_algo", "bootstrap")
"""They decide what the next scale is, not what a cast does with it, so compiled graphs need not know them."""


# --- the spec --------------------------------------------------------------------------------------------------------


def test_every_field_has_another_value_here() -> None:
    """A new field joins CHANGES, and with it every test below."""
    assert set(CHANGES) == {field.name for field in fields(QuantizationSpec) if field.init}


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_counts_in_a_comparison(field: str) -> None:
    """Different in one field: unequal, another hash, another key. Equal in all: equal, same hash, same key."""
    spec = BASES.get(field, QuantizationSpec(E4M3))
    other = replace(spec, **{field: CHANGES[field]})
    assert (spec == other, hash(spec) == hash(other)) == (False, False)
    assert (spec.key == other.key) == (field in HISTORY_FIELDS)
    same = replace(other)
    assert (same == other, hash(same) == hash(other), same.key == other.key) == (True, True, True)


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_survives_json(field: str) -> None:
    """to_dict says what is not at its default, in plain values; from_dict gives an equal spec back."""
    base = BASES.get(field, QuantizationSpec(E4M3))
    spec = replace(base, **{field: CHANGES[field]})
    assert QuantizationSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    if field not in HISTORY_FIELDS:
        assert QuantizationSpec.from_dict(json.loads(spec.key)) == spec
    assert set(spec.to_dict()) == {*base.to_dict(), field}


@sweep
def test_every_format_and_granularity_survives_json(fmt: Format, spec: QuantizationSpec) -> None:
    """All that is registered, and what a YAML file would say."""
    spec = replace(spec, format=fmt)
    assert QuantizationSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    written = {"format": fmt.name.lower(), "granularity": str(spec.granularity), "scale_format": spec.scale_format}
    assert QuantizationSpec.from_dict(written) == spec


def test_specs_are_frozen() -> None:
    """A cell of a recipe changes for nobody."""
    with pytest.raises(FrozenInstanceError):
        QuantizationSpec(E4M3).margin = 1  # type: ignore[misc]


def test_specs_print_what_differs() -> None:
    """Receipts show them."""
    assert str(QuantizationSpec(E4M3)) == "E4M3[tensor]"
    assert str(QuantizationSpec(E4M3, BLOCK_1X128, "pow2")) == "E4M3[1x128, pow2]"
    assert str(QuantizationSpec(E5M2, scaling="delayed")) == "E5M2[tensor, delayed]"
    assert str(QuantizationSpec(E2M1, BLOCK_1X16, "e4m3", rounding="stochastic")) == "E2M1[1x16, e4m3, stochastic]"


@pytest.mark.parametrize(
    "error, values, message",
    [
        (TypeError, {"granularty": "row"}, "did you mean 'granularity'"),
        (ValueError, {"format": "E4M4"}, "did you mean 'E4M3'"),
        (ValueError, {"scale_format": "fp23"}, "did you mean 'fp32'"),
        (ValueError, {"scaling": "delay"}, "did you mean 'delayed'"),
        (ValueError, {"amax_compute_algo": "mx"}, "did you mean 'max'"),
        (ValueError, {"rounding": "nearest"}, "did you mean 'nearest_even'"),
        (ValueError, {"granularity": "1by128"}, "needs 'tensor', 'row' or 'ROWSxCOLS'"),
        (ValueError, {"granularity": 128}, "granularity '128': needs 'tensor', 'row'"),
        (TypeError, {"format": 8}, "format: got 8; needs a Format or the name of one"),
        (TypeError, {"margin": 0.5}, "margin is 0.5; needs a whole number"),
        (TypeError, {"amax_history_len": "16"}, "amax_history_len is '16'; needs a whole number"),
        (ValueError, {"amax_history_len": 0}, "needs 1 or more steps"),
        (ValueError, {"scaling": "delayed", "granularity": "row"}, "Use scaling='current' for rows and blocks"),
        (ValueError, {"scaling": "delayed", "scale_format": "e8m0"}, "one fp32 or pow2 scale"),
        (ValueError, {"scale_format": "e4m3"}, "give a block granularity"),
    ],
)
def test_slips_are_refused_with_a_remedy(error: type[Exception], values: dict[str, Any], message: str) -> None:
    """Nothing unknown is taken, nothing of a wrong type, no combination without a meaning."""
    with pytest.raises(error, match=message):
        QuantizationSpec.from_dict({"format": "E4M3"} | values)


def test_a_spec_needs_a_format() -> None:
    """Missing in a mapping, or a name where the object belongs."""
    with pytest.raises(ValueError, match=r"'format' is missing from .*; give one such as 'E4M3'"):
        QuantizationSpec.from_dict({"margin": 1})
    with pytest.raises(TypeError, match="format is 'E4M3'; needs Format"):
        QuantizationSpec("E4M3")  # type: ignore[arg-type]


# --- which pairs multiply --------------------------------------------------------------------------------------------

E4, E5, FP4 = QuantizationSpec(E4M3), QuantizationSpec(E5M2), QuantizationSpec(E2M1, BLOCK_1X16, "e4m3")
BLOCK, SQUARE = QuantizationSpec(E4M3, BLOCK_1X128), QuantizationSpec(E4M3, BLOCK_128X128)


@pytest.mark.parametrize(
    "lhs, rhs, reason",
    [
        (None, None, None),
        (E4, E4, None),
        (E4, E5, None),
        (E4, replace(E4, granularity=PER_ROW), None),
        (BLOCK, SQUARE, None),
        (FP4, FP4, None),
        (E5, E5, "no tensor core multiplies E5M2 by E5M2; make one of them E4M3"),
        (SQUARE, SQUARE, "no tensor core takes 128x128 blocks on both sides; make one of them 1x128"),
        (E4, None, "one operand is quantized and the other is not; quantize both or neither"),
        (E4, FP4, "E4M3 has 8 bits and E2M1 4; both sides need one width"),
    ],
)
def test_pairs_follow_the_hardware_on_every_device(
    lhs: QuantizationSpec | None, rhs: QuantizationSpec | None, reason: str | None
) -> None:
    """A pure function of two specs that knows no device; the other order says the same."""
    assert refuse_pair(lhs, rhs) == reason
    assert (refuse_pair(rhs, lhs) is None) == (reason is None)


# --- the tensor ------------------------------------------------------------------------------------------------------


@sweep(fmt=OPERANDS)
def test_dequantized_numbers_are_within_half_a_step(fmt: Format, spec: QuantizationSpec) -> None:
    """|x - q / scale| <= eps / 2 |x| + min_subnormal / 2 * scale_inv, and fp32's own roundings: 3 * 2**-24 |x|.

    OCP's floor also saturates, by up to 2 - eps of max; E4M3 block scales round by 1/16 and lose tiny blocks whole.
    """
    x = torch.randn(40, 300) * torch.exp2(torch.randint(-4, 5, (40, 300)).float())
    x_q = quantize(x, replace(spec, format=fmt))
    error = (x_q.dequantize().double() - x.double()).abs()
    scale_inv = spec.granularity.expand(x_q.scale_inv, (40, 300)).double()
    bound = (fmt.eps / 2 + 3 * 2.0**-24) * x.double().abs() + fmt.min_subnormal / 2 * scale_inv
    if spec.scale_format in ("e8m0_floor", "e4m3"):
        bound += (x.double().abs() - fmt.max * scale_inv).clamp(min=0)  # what lies beyond the last number
    assert (error <= bound).all()


@sweep
def test_dequantize_is_codes_times_scale_inv_rounded_once(granularity: Granularity, dtype: torch.dtype) -> None:
    """In fp32, then to the dtype asked for: by default that of the original."""
    x = torch.randn(40, 300).to(dtype)
    x_q = quantize(x, QuantizationSpec(E4M3, granularity))
    exact = x_q.data.to(torch.float32) * granularity.expand(x_q.scale_inv, (40, 300))
    assert torch.equal(x_q.dequantize(), exact.to(dtype))
    assert torch.equal(x_q.dequantize(torch.float32), exact)


@sweep(fmt=OPERANDS)
def test_fields_are_what_they_say(fmt: Format, matrix: Tensor) -> None:
    """shape, dtype of the original, storage dtype of the codes, and the bytes that are really held."""
    x_q = quantize(matrix, QuantizationSpec(fmt, BLOCK_1X128))
    rows, cols = matrix.shape
    assert (x_q.shape, x_q.dtype, x_q.device) == (matrix.shape, matrix.dtype, matrix.device)
    assert x_q.data.dtype == FORMATS[fmt.name].storage_dtype
    assert tuple(x_q.scale_inv.shape) == (rows, math.ceil(cols / 128))
    assert x_q.nbytes == rows * cols + 4 * rows * math.ceil(cols / 128)


@sweep
def test_transposes_share_memory_where_blocks_allow_it(granularity: Granularity) -> None:
    """Square blocks and whole tensors: x.T's codes are x's bytes. 1x128: refused, the remedy is named."""
    x_q = quantize(torch.randn(40, 300), QuantizationSpec(E4M3, granularity))
    if granularity.rows != granularity.cols:
        with pytest.raises(ValueError, match=r"blocks of x are not blocks of x\.T; quantize x\.T itself"):
            x_q.t()
        return
    transposed = x_q.t()
    assert transposed.data.data_ptr() == x_q.data.data_ptr()
    assert torch.equal(transposed.dequantize(), x_q.dequantize().t())
    assert torch.equal(transposed.t().data.view(torch.uint8), x_q.data.view(torch.uint8))


def test_no_operation_dequantizes_behind_your_back() -> None:
    """A QuantizedTensor is no Tensor: torch refuses it loudly, equality is identity, fields are frozen."""
    x_q = quantize(torch.eye(16), QuantizationSpec(E4M3))
    assert not isinstance(x_q, Tensor)
    for operation in (torch.mm, torch.add):
        with pytest.raises(TypeError):
            operation(x_q, x_q)  # type: ignore[operator]
    assert x_q != quantize(torch.eye(16), QuantizationSpec(E4M3))
    with pytest.raises(FrozenInstanceError):
        x_q.data = x_q.data  # type: ignore[misc]
    assert isinstance(x_q, QuantizedTensor)


def test_a_window_predicts_the_scale_of_its_amax_and_nothing_where_there_is_none() -> None:
    """Of one history and of several, by either algorithm and by a function, which may answer anything."""
    history = torch.tensor([[7.0, 448.0], [0.0, 2.0], [0.0, 0.0]])
    least = QuantizationSpec(E4M3, scaling="delayed", amax_compute_algo=lambda row: row.min() / 0)
    for spec, amaxes in (
        (QuantizationSpec(E4M3, scaling="delayed"), [448.0, 2.0, 0.0]),
        (QuantizationSpec(E5M2, scaling="delayed", amax_compute_algo="most_recent", margin=1), [7.0, 0.0, 0.0]),
        (least, [math.inf, math.nan, math.nan]),
    ):
        scale, usable = spec.from_window(history)
        now = compute_scale(torch.tensor(amaxes), spec.format, margin=spec.margin).scale
        assert torch.equal(scale, now)
        assert usable.tolist() == [0 < amax < math.inf for amax in amaxes]
        each = [spec.from_window(row) for row in history]
        assert [(float(one), bool(use)) for one, use in each] == list(zip(scale.tolist(), usable.tolist(), strict=True))
