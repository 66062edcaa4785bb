"""torchao as a witness of a whole linear layer: y, dx and dw of its emulation against ours, forward and backward.

Row-wise recipes scale by powers of two, where every order of scaling and summing gives the same bits: equal, bit for
bit. Tensor-wise, torchao divides each operand by its scale in fp32 and then multiplies (a rounding for every element);
ours multiplies the codes, which is exact, and scales the sum (two roundings for every output). The tests prove that
this is the whole difference: torchao's formula on *our* codes gives torchao's bits, and ours is closer to fp64.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import CastConfig, Float8LinearRecipeName, ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_dtype, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

import ottava
from ottava.kernels import reference
from ottava.numerics.formats import BF16, E2M1, E4M3, E5M2, Format
from ottava.numerics.scaling import BLOCK_1X16, BLOCK_1X32, amax, compute_scale, exponent_bytes
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.ops import dispatch
from test_docs import read_blocks


@pytest.fixture(autouse=True)
def _sums_in_torchaos_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both run torch's fp32 GEMM; faster kernels sum in another order and round otherwise."""
    monkeypatch.setattr(dispatch, "CPU_KERNELS", (reference,))


SIZES = [(16, 16, 16), (32, 48, 64), (128, 96, 320)]
"""(M, N, K): tokens, out features, in features."""
TENSOR_E4M3, TENSOR_E5M2 = QuantizationSpec(E4M3), QuantizationSpec(E5M2)


class Step(NamedTuple):
    """One forward and backward of a linear layer."""

    y: Tensor
    dx: Tensor
    dw: Tensor


class Case(NamedTuple):
    """A layer and its tensors, all bf16; rows and columns differ in magnitude by up to 2**12 each.

    Less would hide which elements share a scale: powers of two change a code only where it is subnormal or saturates.
    """

    linear: nn.Linear
    x: Tensor
    dy: Tensor


def case(sizes: tuple[int, int, int], bias: bool = False) -> Case:
    m, n, k = sizes
    linear = nn.Linear(k, n, bias=bias)
    linear.weight.data = spread(n, k)
    return Case(linear.bfloat16(), spread(m, k).bfloat16(), (spread(m, n) * 1e-3).bfloat16())


def spread(rows: int, cols: int) -> Tensor:
    """Random numbers times a power of two for the row and one for the column."""
    return torch.randn(rows, cols) * torch.exp2(-torch.randint(13, (rows, 1)) - torch.randint(13, (1, cols)))


def step(model: nn.Module, weight: nn.Parameter, given: Case) -> Step:
    x = given.x.clone().requires_grad_()
    y = model(x)
    y.backward(given.dy)
    assert x.grad is not None
    assert weight.grad is not None
    return Step(y.detach(), x.grad, weight.grad)


def torchao_step(recipe: str, given: Case) -> Step:
    model = nn.Sequential(copy.deepcopy(given.linear))
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    convert_to_float8_training(model, config=config)
    assert type(model[0]).__name__ == "Float8Linear"
    return step(model, model[0].weight, given)


def our_step(recipe: str, given: Case) -> Step:
    model = nn.Sequential(copy.deepcopy(given.linear))
    ottava.convert(model, recipe, filter=lambda name, layer: True)
    ours = step(model, model[0].weight, given)
    assert ottava.receipt(model).fp8_fraction > 0
    return ours


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_rowwise_layers_are_torchaos_bit_for_bit(recipe: str, sizes: tuple[int, int, int]) -> None:
    """y, dx and dw, through `convert`, autograd and all; "with_gw_hp" keeps dw in BF16."""
    given = case(sizes)
    for ours, theirs in zip(our_step(recipe, given), torchao_step(recipe, given), strict=True):
        assert torch.equal(ours, theirs)


def codes_and_scale(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """torchao's own cast of a tensor: codes, and the scale that multiplies."""
    config = LinearMMConfig()
    tensorwise = ScalingGranularity.TENSORWISE
    x_q = hp_tensor_to_float8_dynamic(x, fmt.storage_dtype, config, scaling_granularity=tensorwise)
    return x_q._data, x_q._scale


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensorwise_codes_and_scales_are_torchaos(fmt: Format, dtype: torch.dtype) -> None:
    """It divides in fp64 and rounds to fp32, ours divides in fp32: the same number, by 53 >= 2 * 24 + 2 bits."""
    for _ in range(50):
        x = (torch.randn(24, 40) * torch.rand(()) * 100).to(dtype)
        theirs, their_scale = codes_and_scale(x, fmt)
        ours = ottava.quantize(x, QuantizationSpec(fmt))
        assert torch.equal(ours.data.view(torch.uint8), theirs.view(torch.uint8))
        assert torch.equal(compute_scale(amax(x), fmt).scale.reshape(()), their_scale.reshape(()))
        assert torch.equal(ours.scale_inv.reshape(()), their_scale.reshape(()).reciprocal())


class Operand(NamedTuple):
    """Our codes, and the scale that they were multiplied with."""

    x_q: QuantizedTensor
    scale: Tensor

    def t(self) -> Operand:
        return Operand(self.x_q.t(), self.scale)


def operand(x: Tensor, spec: QuantizationSpec) -> Operand:
    return Operand(ottava.quantize(x, spec), compute_scale(amax(x), spec.format).scale)


def gemms(given: Case) -> dict[str, tuple[Operand, Operand]]:
    """(lhs, rhs) of the three GEMMs of recipe "tensorwise", by their result."""
    x, w = operand(given.x, TENSOR_E4M3), operand(given.linear.weight.detach(), TENSOR_E4M3)
    dy = operand(given.dy, TENSOR_E5M2)
    return {"y": (x, w), "dx": (dy, w.t()), "dw": (dy.t(), x.t())}


def divided_first(lhs: Operand, rhs: Operand) -> Tensor:
    """torchao's emulation: each operand divided by its scale in fp32, then the GEMM; not yet rounded to bf16."""
    return (lhs.x_q.data.float() / lhs.scale) @ (rhs.x_q.data.float() / rhs.scale).t()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_tensorwise_differs_from_torchao_by_its_division_alone(sizes: tuple[int, int, int]) -> None:
    """torchao's layer is torchao's formula on our codes, bit for bit; ours is our GEMM on them; an ulp lies between.

    Where fp32 sums cancel, an ulp of the result is less than their rounding: at most K * 2**-24 * sum |a||b|.
    """
    given = case(sizes)
    theirs, ours = torchao_step("tensorwise", given), our_step("tensorwise", given)
    for (lhs, rhs), their_result, our_result in zip(gemms(given).values(), theirs, ours, strict=True):
        assert torch.equal(their_result, divided_first(lhs, rhs).bfloat16())
        assert torch.equal(our_result, reference.gemm(lhs.x_q, rhs.x_q, torch.bfloat16, None))
        magnitude = lhs.x_q.dequantize(torch.float64).abs() @ rhs.x_q.dequantize(torch.float64).abs().t()
        accumulation = (lhs.x_q.shape[1] + 6) * 2.0**-24 * magnitude
        ulp = BF16.eps * their_result.double().abs()
        assert ((our_result.double() - their_result.double()).abs() <= ulp + 2 * accumulation).all()
        assert (our_result != their_result).double().mean() < 1e-2


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_bias_is_rounded_once_where_torchao_rounds_twice(recipe: str) -> None:
    """torchao rounds y to bf16 and adds the bias to that; ours adds it to the fp32 sum: 3 outputs of 10 differ."""
    given = case((128, 96, 320), bias=True)
    without = Case(nn.Linear(320, 96, bias=False).bfloat16(), given.x, given.dy)
    without.linear.weight = given.linear.weight
    bias = given.linear.bias.detach()
    theirs, theirs_without = torchao_step(recipe, given), torchao_step(recipe, without)
    assert torch.equal(theirs.y, theirs_without.y + bias)
    ours = our_step(recipe, given)
    spec = ottava.RECIPES[recipe].fprop.lhs
    assert spec is not None
    x_q, w_q = ottava.quantize(given.x, spec), ottava.quantize(given.linear.weight.detach(), spec)
    in_fp32 = reference.gemm(x_q, w_q, torch.float32, bias)
    assert torch.equal(ours.y, in_fp32.bfloat16())
    our_error, their_error = ((y.double() - in_fp32.double()).abs().mean() for y in (ours.y, theirs.y))
    assert our_error < their_error


def test_torchaos_mxfp4_and_nvfp4_have_the_nan_of_a_block_in_its_scale() -> None:
    """The same elements decode to NaN, and the scale has the same code. Its infinities saturate; ours are NaN."""
    x = torch.randn(3, 128)
    x[0, 3], x[2, 100] = math.nan, -math.nan
    spec = QuantizationSpec(E2M1, BLOCK_1X32, "e8m0")
    scales, codes = to_mx(x, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.RCEIL)
    ours = ottava.quantize(x, spec)
    theirs = to_dtype(codes, scales, torch.float4_e2m1fn_x2, 32, torch.float32)
    assert torch.equal(exponent_bytes(ours.scale_inv), scales.view(torch.uint8))
    assert torch.equal(ours.dequantize(torch.float32).isnan(), theirs.isnan())
    nvfp4 = ottava.quantize(x, QuantizationSpec(E2M1, BLOCK_1X16, "e4m3"))
    theirs = NVFP4Tensor.to_nvfp4(x).dequantize(torch.float32)
    assert torch.equal(nvfp4.dequantize(torch.float32).isnan(), theirs.isnan())


def test_the_page_for_those_who_come_from_torchao_shows_the_same_layer() -> None:
    """docs/from_torchao.md: its two blocks make models with the same bits, and each name of torchao's in it exists."""
    text = (Path(__file__).resolve().parents[1] / "docs" / "from_torchao.md").read_text(encoding="utf-8")
    blocks = [block.text for block in read_blocks(text) if block.language == "python"][:2]
    shown: dict[str, Any] = {}
    for block in blocks:
        exec(block, shown)
    results = []
    for model in (shown["ours"], shown["theirs"]):
        x = shown["x"].clone().requires_grad_()
        try:
            y = model(x)
        except RuntimeError as error:  # torchao calls torch's scaled GEMM; that of 2.11 takes one scale on a CPU
            if model is shown["ours"] or "numel() == 1" not in str(error):
                raise
            pytest.skip("this torch takes one scale for a tensor here")
        y.backward(torch.ones_like(y))
        results.append((y, x.grad, *(weight.grad for weight in model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    plain = copy.deepcopy(shown["model"])
    assert not torch.equal(plain(shown["x"]), results[0][0])
    fields = {field.name for field in dataclasses.fields(Float8LinearConfig)}
    fields |= {field.name for field in dataclasses.fields(CastConfig)} | {"use_fast_accum", "module_filter_fn"}
    assert set(re.findall(r"(\w+)=", "".join(re.findall(r"^\| (.+?) \|", text.partition("## MS")[0], re.M)))) <= fields
    recipes = re.findall(r'^\| `Float8LinearConfig.from_recipe_name\("(\w+)"\)` \| `"(\w+)"` \|$', text, re.M)
    assert {theirs for theirs, _ in recipes} == {name.value for name in Float8LinearRecipeName}
    assert all(ours in ottava.RECIPES for _, ours in recipes)
