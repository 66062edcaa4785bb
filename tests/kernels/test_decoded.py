"""The GEMM by BF16: which part is exact, how far the rest may be, and when it runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.operands import Float64Gemm, Pair
from ottava.kernels import decoded, reference
from ottava.numerics.formats import BF16, FP16
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.ops.dispatch import ACCELERATOR_KERNELS
from ottava.ops.quantize import quantize
from sweep import sweep


def operands(pair: Pair, m: int = 33, n: int = 17, k: int = 300) -> tuple[QuantizedTensor, QuantizedTensor]:
    return quantize(torch.randn(m, k), pair[0]), quantize(torch.randn(n, k), pair[1])


def kind(a: QuantizedTensor, b: QuantizedTensor) -> tuple[bool, bool]:
    """(scales change along K, operands are rounded to BF16)."""
    in_blocks = max(a.scale_inv.shape[1], b.scale_inv.shape[1]) > 1
    return in_blocks, in_blocks and any(t.spec.scale_format in ("fp32", "e4m3") for t in (a, b))


@sweep(with_bias=[False, True])
def test_every_pair_is_within_its_bound(pair: Pair, with_bias: bool, float64_gemm: Float64Gemm) -> None:
    """fp32 accumulation, and two roundings to BF16 only where a block's scale is no power of two."""
    a, b = operands(pair)
    bias = torch.randn(17).bfloat16() if with_bias else None
    exact, accumulation = float64_gemm(a, b, bias)
    magnitude = accumulation / ((300 + 6) * 2.0**-24)
    in_blocks, rounds = kind(a, b)
    bound = accumulation + (1.01 * BF16.eps * magnitude if rounds else 0.0)
    y = decoded.gemm(a, b, torch.float32, bias)
    assert ((y.double() - exact).abs() <= bound).all()
    if in_blocks and not rounds:
        assert torch.equal(y, reference.gemm(a, b, torch.float32, bias))


def test_refusals_say_why() -> None:
    """On a CPU the reference is faster and exact; FP16's 10 bits do not fit."""
    a, b = operands((QuantizationSpec(FP16),) * 2)
    assert decoded.supports_gemm(a, b, torch.bfloat16, None) == "decoded_bf16: FP16 x FP16 does not fit in BF16"
    a, b = operands((QuantizationSpec(BF16),) * 2)
    assert decoded.supports_gemm(a, b, torch.bfloat16, None) == "decoded_bf16: runs on cuda; got cpu"
    a, b = operands((QuantizationSpec(BF16),) * 2, m=0)
    assert decoded.supports_gemm(a, b, torch.bfloat16, None) == "decoded_bf16: an empty operand"


@pytest.mark.parametrize("capability, taken", [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_it_needs_bf16_tensor_cores(
    capability: tuple[int, int], taken: bool, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From sm_80 on; it comes after the native kernel, before the reference."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode():
        sides = []
        for spec in pair:
            grid = spec.granularity.grid_shape((32, 256))
            codes = torch.empty(32, 256, dtype=spec.format.storage_dtype, device="cuda")
            sides.append(QuantizedTensor(codes, torch.empty(grid, device="cuda"), spec, torch.bfloat16))
        reason = decoded.supports_gemm(sides[0], sides[1], torch.bfloat16, None)
    assert (reason is None) is taken
    names = [kernel.NAME for kernel in ACCELERATOR_KERNELS]
    assert names == ["scaled_mm", "decoded_bf16", "triton_gemm", "reference"]


@pytest.mark.gpu
def test_the_device_agrees(pair: Pair, float64_gemm: Float64Gemm) -> None:
    """BF16 tensor cores with an fp32 result: the bound of the emulation on a CPU."""
    a, b = operands(pair)
    exact, accumulation = float64_gemm(a, b, None)
    magnitude = accumulation / ((300 + 6) * 2.0**-24)
    on_gpu = [replace(t, data=t.data.cuda(), scale_inv=t.scale_inv.cuda()) for t in (a, b)]
    y = decoded.gemm(on_gpu[0], on_gpu[1], torch.float32, None).cpu()
    bound = accumulation + (1.01 * BF16.eps * magnitude if kind(a, b)[1] else 0.0)
    assert ((y.double() - exact).abs() <= bound).all()
