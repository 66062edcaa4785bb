"""A weight that is stored only as codes: what it takes, what it refuses, and that no bit is lost on the way."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ottava.numerics.formats import E2M1, E4M3
from ottava.numerics.scaling import BLOCK_1X32
from ottava.numerics.tensor import QuantizationSpec
from ottava.ops.quantize import quantize
from ottava.recipe import RECIPES
from ottava.weights.operands import stored_as
from ottava.weights.parameter import QuantizedWeight, adopt_scales, is_quantized_weight, quantized_weight, stored_spec
from sweep import sweep
from weight_samples import parameter, same

CELLS = {row: col for recipe in RECIPES.values() for row, col in [recipe.cells("weight")] if row is not None}
SHAPES = ((64, 96), (130, 257), (1, 1), (0, 32), (3, 64, 96))


@sweep(spec=tuple(CELLS), shape=SHAPES)
def test_it_is_the_cast_of_its_numbers(spec: QuantizationSpec, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Codes and scales are those of `quantize`, matrix by matrix, and what it gives back is what they stand for."""
    values = torch.randn(shape).to(dtype)
    weight = quantized_weight(values, spec)
    casts = [quantize(part, stored_spec(spec)) for part in (values if len(shape) == 3 else (values,))]
    decoded = torch.stack([cast.dequantize() for cast in casts]) if len(shape) == 3 else casts[0].dequantize()
    assert torch.equal(weight.dequantize(), decoded)
    assert weight.dequantize().dtype == weight.dtype == dtype
    assert torch.equal(
        weight.codes.view(torch.uint8).flatten(), torch.cat([c.data.view(torch.uint8).flatten() for c in casts])
    )
    scale_bytes = 1 if "e8m0" in spec.scale_format else 4
    assert weight.nbytes == weight.codes.numel() + scale_bytes * weight.scale_inv.numel()
    weight.requantize_(values.float() * 3)
    assert same(weight, quantized_weight((values.float() * 3).to(dtype), spec))


def test_codes_are_cast_from_the_outer_dtype() -> None:
    """From a BF16 weight's numbers where its dtype is BF16: fp32 numbers between two of BF16 take their way."""
    spec = QuantizationSpec(E4M3, scale_format="pow2")
    master = torch.tensor([[448.0, 17.0 + 2**-6]])  # a tie of E4M3 in BF16, above it in fp32
    for dtype, wanted in ((torch.bfloat16, 16.0), (torch.float32, 18.0)):
        weight = quantized_weight(torch.zeros(1, 2, dtype=dtype), spec)
        weight.requantize_(master)
        assert weight.dequantize().tolist() == [[448.0, wanted]]


def test_it_is_a_parameter_and_its_copies_too(tmp_path: Path) -> None:
    """deepcopy, pickle, torch.save, .to(), clone: the same bits in memory of their own; a Parameter stays one."""
    weight = parameter(keep=True)
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    torch.save(weight, tmp_path / "weight.pt")
    loaded = torch.load(tmp_path / "weight.pt", weights_only=False)
    for made in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight)), loaded):
        assert isinstance(made, nn.Parameter)
        assert made.requires_grad
    for made in (copy.deepcopy(weight), loaded, weight.detach().clone(), weight.detach().to(torch.float32)):
        assert is_quantized_weight(made)
        assert same(made, weight)
        assert made.codes.data_ptr() != weight.codes.data_ptr() or made.dtype != weight.dtype
        assert made.high_precision is not None
    shared = copy.deepcopy(weight).share_memory_()
    assert same(shared, weight)
    assert shared.codes.is_shared()
    assert shared.scale_inv.is_shared()
    memo: dict[int, object] = {}
    assert copy.deepcopy([weight, weight], memo)[0] is memo[id(weight)]
    assert stored_as(weight) == QuantizationSpec(E4M3)


def test_gradients_pass_through_dequantize() -> None:
    weight = parameter()
    (weight.dequantize(torch.float32) * 3).sum().backward()
    assert type(weight.grad) is Tensor
    assert weight.grad.dtype == torch.bfloat16
    assert torch.equal(weight.grad, torch.full((64, 96), 3.0, dtype=torch.bfloat16))


def test_data_can_be_read_and_set() -> None:
    """`weight.data = values` casts them in place; what would change shape, dtype or device is refused."""
    weight, values = parameter(), torch.randn(64, 96, dtype=torch.bfloat16)
    memory, version = weight.codes.data_ptr(), weight._version
    weight.data = values
    assert same(weight, quantized_weight(values, weight.spec))
    assert weight._version > version
    other = parameter()
    weight.data = other.data
    assert same(weight, other)
    assert weight.codes.data_ptr() == memory
    assert weight.data.codes.data_ptr() == memory
    assert (weight.data.requires_grad, weight.requires_grad) == (False, True)
    for wrong in (values[:2], values.float(), values.to("meta")):
        with pytest.raises(ValueError, match=r"model\.to\(\.\.\.\)"):
            weight.data = wrong
    with pytest.raises(TypeError, match="got None; needs a tensor"):
        weight.data = None
    assert same(weight, other)


def test_what_is_not_finite_is_nan() -> None:
    """At its place, or in all of a block whose format has no NaN; also beside a known amax, which leaves it out."""
    values = torch.ones(2, 64)
    values[0, :3] = torch.tensor([float("inf"), -float("inf"), float("nan")])
    wide, narrow = QuantizationSpec(E4M3), QuantizationSpec(E2M1, BLOCK_1X32, "e8m0")
    whole = QuantizationSpec(E2M1)
    for spec, amax, lost in (
        (wide, None, 3),
        (wide, torch.ones(()), 3),
        (narrow, None, 32),
        (whole, torch.ones(()), 128),
    ):
        weight = quantized_weight(torch.ones(2, 64), spec)
        weight.requantize_(values, amax=amax)
        nan = weight.dequantize().isnan()
        assert (int(nan.sum()), bool(nan[0, :3].all())) == (lost, True), spec
        loaded = adopt_scales(weight.scales.clone(), spec)
        assert torch.equal(loaded.view(torch.uint8), weight.scales.view(torch.uint8)), spec


def test_what_it_does_not_take_is_refused_by_name() -> None:
    """Arithmetic, torch's own linear, a step of torch's optimizers: one sentence with what to do."""
    weight = parameter()
    weight.grad = torch.ones_like(weight)
    calls = {
        "aten.mul.Tensor": lambda: weight * 2,
        "aten.t.default": lambda: nn.functional.linear(torch.ones(2, 96, dtype=torch.bfloat16), weight),
        "aten.add_.Tensor": lambda: torch.optim.SGD([weight], 0.1, foreach=False).step(),
        "aten.transpose.int": lambda: weight.transpose(0, 1),
    }
    for name, call in calls.items():
        with pytest.raises(NotImplementedError, match=re.escape(name)) as caught:
            call()
        assert "weight.dequantize()" in str(caught.value)
        assert "ottava.optim.AdamW" in str(caught.value)
    with pytest.raises(ValueError, match="needs \\(64, 96\\)"):
        weight.requantize_(torch.ones(2, 2))
    with pytest.raises(TypeError, match=re.escape("requantize_: got a list; needs a tensor (64, 96)")):
        weight.requantize_([1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="outer dtype"):
        QuantizedWeight(weight.codes, weight.scale_inv, weight.spec, torch.float64)
    with pytest.raises(ValueError, match="has \\(1, 1\\)"):
        QuantizedWeight(weight.codes, torch.ones(2, 2), weight.spec, torch.bfloat16)
