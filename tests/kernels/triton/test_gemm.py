"""The Triton GEMM against the reference: bits where sums are exact, else a bound.

In the interpreter here, on a GPU with -m gpu.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.operands import Float64Gemm
from ottava.kernels import reference
from ottava.kernels.triton import gemm as triton_gemm
from ottava.kernels.triton.gemm import CONFIGS, Config, configs, run
from ottava.numerics.formats import BF16, E4M3, E5M2
from ottava.numerics.scaling import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, PER_ROW, PER_TENSOR, Granularity
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.ops import dispatch, quantize
from ottava.ops import gemm as ops
from triton_mode import DEVICE, ON_GPU, never_waits, with_triton

HOPPER = ON_GPU and torch.cuda.get_device_capability()[0] == 9
pytestmark = [*with_triton(), *([pytest.mark.skipif(not HOPPER, reason="needs sm_90")] if ON_GPU else [])]

SIDES = {
    "tensor": (PER_TENSOR, PER_TENSOR),
    "row": (PER_ROW, PER_ROW),
    "tensor x row": (PER_TENSOR, PER_ROW),
    "1x128 x 128x128": (BLOCK_1X128, BLOCK_128X128),
    "128x128 x 1x128": (BLOCK_128X128, BLOCK_1X128),
    "1x128 x 1x128": (BLOCK_1X128, BLOCK_1X128),
}
MIXED = {"tensor x 1x128": (PER_TENSOR, BLOCK_1X128), "row x 128x128": (PER_ROW, BLOCK_128X128)}
"""The reference sums these in other steps along K than blocks of 128."""
Sides = tuple[Granularity, Granularity]


def integers(rows: int, cols: int, granularity: Granularity) -> QuantizedTensor:
    """Codes that are small integers, so that every order of summation gives the same bits; any fp32 scales."""
    codes = torch.randint(-8, 9, (rows, cols)).float().to(torch.float8_e4m3fn)
    spec = QuantizationSpec(E4M3, granularity)
    scales = torch.rand(granularity.grid_shape((rows, cols))) + 0.5
    return QuantizedTensor(codes, scales, spec, torch.bfloat16)


def cast(rows: int, cols: int, granularity: Granularity, scale_format: str = "fp32") -> QuantizedTensor:
    return quantize.quantize(torch.randn(rows, cols), QuantizationSpec(E4M3, granularity, scale_format))


def on_device(x: QuantizedTensor) -> QuantizedTensor:
    return replace(x, data=x.data.to(DEVICE), scale_inv=x.scale_inv.to(DEVICE))


def triton(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, bias: Tensor | None, config: Config) -> Tensor:
    y = run(on_device(a), on_device(b), dtype, None if bias is None else bias.to(DEVICE), config)
    assert y.shape == (a.shape[0], b.shape[0])
    assert y.dtype == dtype
    assert y.is_contiguous()
    return y.cpu()


def short_accumulator(k: int) -> float:
    """What Hopper adds to the bound of fp32 sums, in units of it; nothing in the interpreter.

    An instruction aligns 32 products and the sum so far to the largest of them and cuts all 33 at 2**-13 of that, which
    is no more than the sum of all magnitudes, K / 32 times.
    """
    return -(-k // 32) * 33 * 2.0**-13 / ((k + 6) * 2.0**-24) if ON_GPU else 0.0


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("sides", SIDES.values(), ids=SIDES)
def test_exact_sums_have_the_bits_of_the_reference(sides: Sides, dtype: torch.dtype) -> None:
    """Integers and a bias, scales of any fp32 number, several tiles, ragged, under every configuration of the call;
    the interpreter, which is slow, rounds to other dtypes than bf16 under one of them.

    A GPU may fuse a block's scale into the addition: there, blocks have a bound instead.
    """
    a, b, bias = integers(200, 300, sides[0]), integers(140, 300, sides[1]), torch.randn(140)
    truth = reference.gemm(a, b, dtype, bias)
    known = configs(a, b, dtype, fast_accum=True)
    for config in known if ON_GPU or dtype == torch.bfloat16 else known[-1:]:
        y = triton(a, b, dtype, bias, config)
        if ON_GPU:
            torch.testing.assert_close(y, truth, rtol=torch.finfo(dtype).eps, atol=1e-3)
        else:
            assert torch.equal(y, truth), config


@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (1, 8, 16), (129, 257, 130), (64, 24, 512), (130, 8, 640), (3, 5, 7)])
@pytest.mark.parametrize("sides", [SIDES["row"], SIDES["1x128 x 128x128"], SIDES["1x128 x 1x128"]], ids=str)
def test_every_size(sides: Sides, m: int, n: int, k: int) -> None:
    """One element, edges in every direction, rows that no descriptor can write, and more tiles than programs."""
    a, b = integers(m, k, sides[0]), integers(n, k, sides[1])
    config = configs(a, b, torch.float32)[-1]
    y, truth = triton(a, b, torch.float32, None, config), reference.gemm(a, b, torch.float32, None)
    assert torch.equal(y, truth) if not ON_GPU else torch.allclose(y, truth, rtol=1e-5, atol=1e-3)


def shortened(sums: Tensor) -> Tensor:
    """The upper 14 bits of each number: what a tensor core of Hopper keeps."""
    return (sums.contiguous().view(torch.int32) & ~0x3FF).view(torch.float32)


@pytest.mark.skipif(ON_GPU, reason="the interpreter stands in for a short accumulator")
@pytest.mark.parametrize("promote", [0, 128, 256, 512])
def test_sums_are_short_for_one_interval_only(promote: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a dot that forgets all but 14 bits after each step, y is what promotions every so often make of it."""
    from triton.runtime import interpreter

    exact_dot = interpreter.InterpreterBuilder.create_dot

    def short_dot(*arguments: object) -> object:
        sums = exact_dot(*arguments)
        return interpreter.TensorHandle(shortened(torch.from_numpy(sums.data)).numpy(), sums.dtype)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", short_dot)
    a, b = cast(64, 1408, PER_TENSOR), cast(32, 1408, PER_TENSOR)
    lhs, rhs = a.data.float(), b.data.float()
    total, partial = torch.zeros(64, 32), torch.zeros(64, 32)
    for start in range(0, 1408, 128):
        product = lhs[:, start : start + 128] @ rhs[:, start : start + 128].t()
        partial = shortened(product + partial)
        if promote and (start + 128) % promote == 0:
            total, partial = total + partial, torch.zeros(64, 32)
    truth = (total + partial) * a.scale_inv * b.scale_inv
    y = triton(a, b, torch.float32, None, Config(64, 128, 3, 4, promote))
    assert torch.allclose(y, truth, rtol=1e-3, atol=0.02)
    off = (y - truth).abs() > 1e-5 * truth.abs()
    assert off.float().mean() < 0.05  # a sum in another order falls to the other side of a cut now and then


@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("sides", (SIDES | MIXED).values(), ids=SIDES | MIXED)
def test_random_operands_are_within_the_bound(sides: Sides, with_bias: bool, float64_gemm: Float64Gemm) -> None:
    """fp32 accumulation in another order; on a GPU 14 bits of at most 128 products besides."""
    a, b = cast(70, 300, sides[0]), cast(40, 300, sides[1])
    bias = torch.randn(40).bfloat16() if with_bias else None
    exact, bound = float64_gemm(a, b, bias)
    bound = bound + short_accumulator(300) * bound
    y = triton(a, b, torch.float32, bias, configs(a, b, torch.float32)[0])
    assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("formats", [(E5M2, E4M3), (E4M3, E5M2)], ids=str)
def test_gradients_in_e5m2(formats: tuple[object, object], float64_gemm: Float64Gemm) -> None:
    """Either side may be E5M2."""
    a, b = (quantize.quantize(torch.randn(33, 200), QuantizationSpec(fmt)) for fmt in formats)
    exact, bound = float64_gemm(a, b, None)
    y = triton(a, b, torch.float32, None, CONFIGS[-1])
    assert ((y.double() - exact).abs() <= bound + short_accumulator(200) * bound).all()


def test_what_is_not_finite_stays_in_its_row() -> None:
    """A NaN code or an infinite one of E5M2 in a row of a, or a NaN scale, is a row of such in y, and nowhere else."""
    for name, where in (("row", "codes"), ("1x128 x 128x128", "codes"), ("row", "scales"), ("1x128 x 1x128", "scales")):
        a, b = (integers(rows, 130, side) for rows, side in zip((70, 40), SIDES[name], strict=True))
        (a.data if where == "codes" else a.scale_inv)[3, -1] = torch.nan
        y = triton(a, b, torch.bfloat16, None, configs(a, b, torch.bfloat16)[-1])
        assert y[3].isnan().all(), (name, where)
        assert y.isnan().sum() == 40, (name, where)
    a, b = integers(70, 130, PER_TENSOR), integers(40, 130, PER_TENSOR)
    a, b = replace(a, data=a.data.float().to(torch.float8_e5m2), spec=QuantizationSpec(E5M2)), b
    a.data[3, 0], b.data[:, 0] = torch.inf, 1.0
    y = triton(a, b, torch.bfloat16, None, CONFIGS[-1])
    assert y[3].isposinf().all()
    assert y.isfinite().sum() == 69 * 40


def test_layouts_of_the_operands_do_not_matter() -> None:
    """Transposed codes and an address that no descriptor takes are copied."""
    a, b = integers(48, 32, PER_TENSOR), integers(40, 32, PER_TENSOR)
    truth = reference.gemm(a, b, torch.float32, None)
    column_major = replace(a, data=a.data.t().contiguous().t())
    shifted = torch.empty(48 * 32 + 1, dtype=torch.uint8)[1:].view(torch.float8_e4m3fn).view(48, 32)
    shifted.copy_(a.data)
    for operand in (column_major, replace(a, data=shifted)):
        assert torch.equal(triton(operand, b, torch.float32, None, CONFIGS[-1]), truth)


# --- the op and its configurations -----------------------------------------------------------------------------------


def test_the_operator_runs_it_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, through torch's custom operator too; the log says what was padded."""
    a, b = on_device(integers(20, 100, PER_ROW)), on_device(integers(24, 100, PER_ROW))
    monkeypatch.setattr(dispatch, "CPU_KERNELS", (triton_gemm, reference))
    monkeypatch.setattr(dispatch, "_in_order", lambda kernels, native: kernels)
    monkeypatch.setattr(dispatch, "ACCELERATOR_KERNELS", (triton_gemm, reference))
    monkeypatch.setattr(triton_gemm, "supports_gemm", lambda *_: None)
    truth, log = reference.gemm(a, b, torch.bfloat16, None), []
    assert torch.equal(ops.gemm(a, b, out_dtype=torch.bfloat16, backend="triton_gemm", log=log.append), truth)
    assert (log[0].kernel, log[0].native, log[0].padding) == ("triton_gemm", True, "K 100->112")
    arguments = (a.data, a.scale_inv, a.spec.key, b.data, b.scale_inv, b.spec.key, torch.bfloat16, None, False)
    assert torch.equal(torch.ops.ottava.gemm(*arguments), truth)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(value) if isinstance(value, Tensor) else value for value in arguments]
        promised = torch.ops.ottava.gemm(*fake)
    assert (promised.shape, promised.dtype, promised.stride()) == (truth.shape, truth.dtype, truth.stride())


def test_one_plan_runs_all_operands_of_its_shapes() -> None:
    """Other codes, other scales, a scale that lies otherwise, and a bias; with and without padding."""
    for sides, k in (("row", 100), ("1x128 x 128x128", 256)):
        first, second = SIDES[sides]
        plan, seen = None, []
        for _ in range(2):
            a, b, bias = on_device(integers(20, k, first)), on_device(integers(24, k, second)), torch.randint(9, (24,))
            bias = bias.bfloat16().to(DEVICE)
            b = replace(b, scale_inv=b.scale_inv.t().contiguous().t())
            plan = triton_gemm.plan_gemm(a, b, torch.float32, bias) if plan is None else plan
            seen.append(plan(a, b, bias))
            assert torch.equal(seen[-1], reference.gemm(a, b, torch.float32, bias)), sides
        assert not torch.equal(*seen)


def test_accurate_accumulation_promotes_every_128() -> None:
    """And fast accumulation may choose; blocks know no other way; an fp32 result has no wide tile."""
    a, rows, blocks = (cast(8, 16, granularity) for granularity in (PER_TENSOR, PER_ROW, BLOCK_1X128))
    assert {config.promote for config in configs(a, rows, torch.bfloat16)} == {128}
    assert {config.promote for config in configs(a, rows, torch.bfloat16, fast_accum=True)} == {0, 128, 256, 512}
    assert {config.promote for config in configs(blocks, blocks, torch.bfloat16, fast_accum=True)} == {128}
    assert max(config.cols for config in configs(a, rows, torch.float32, fast_accum=True)) == 128
    assert all(configs(x, y, dtype) for x in (a, blocks) for y in (a, blocks) for dtype in (torch.float32,))
    assert len({triton_gemm.way(config) for config in CONFIGS}) == len(CONFIGS)


REFUSED = {
    "format": (QuantizationSpec(BF16), torch.bfloat16, "triton_gemm: takes E4M3 and E5M2; got BF16 and BF16"),
    "blocks": (
        QuantizationSpec(E4M3, BLOCK_1X32),
        torch.bfloat16,
        "triton_gemm: takes scales per tensor, per row, 1x128 and 128x128; got 1x32",
    ),
    "output": (
        QuantizationSpec(E4M3),
        torch.float64,
        "triton_gemm: gives bfloat16, float16 and float32; got torch.float64",
    ),
    "device": (QuantizationSpec(E4M3), torch.bfloat16, "triton_gemm: runs on cuda; got cpu"),
}


@pytest.mark.parametrize("spec, dtype, message", REFUSED.values(), ids=REFUSED)
def test_refusals_say_why(spec: QuantizationSpec, dtype: torch.dtype, message: str) -> None:
    x = quantize.quantize(torch.ones(8, 64), spec)
    assert triton_gemm.supports_gemm(x, x, dtype, None) == message
    empty = quantize.quantize(torch.ones(0, 64), QuantizationSpec(E4M3))
    assert triton_gemm.supports_gemm(empty, empty, torch.bfloat16, None) == "triton_gemm: an empty operand"


@pytest.mark.parametrize("capability, taken", [((8, 9), False), ((9, 0), True), ((10, 0), False)])
def test_it_is_written_for_hopper(capability: tuple[int, int], taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere its tiles spill, or there are no such instructions."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode():
        codes = torch.empty(32, 256, dtype=torch.float8_e4m3fn, device="cuda")
        x = QuantizedTensor(codes, torch.empty(1, 1, device="cuda"), QuantizationSpec(E4M3), torch.bfloat16)
        reason = triton_gemm.supports_gemm(x, x, torch.bfloat16, None)
    assert (reason is None) is taken
    assert taken or "written for Hopper (sm_90); this device is sm_" in str(reason)


# --- what only a device shows ----------------------------------------------------------------------------------------


@pytest.mark.skipif(not HOPPER, reason="needs sm_90")
def test_it_can_be_captured_in_a_graph_and_never_waits() -> None:
    """Replayed on other codes it gives their product."""
    a, b = on_device(integers(256, 512, PER_ROW)), on_device(integers(128, 512, PER_ROW))
    run(a, b, torch.float32, None, CONFIGS[-1])
    with never_waits():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(a, b, torch.float32, None, CONFIGS[-1])
    other = on_device(integers(256, 512, PER_ROW))
    a.data.copy_(other.data)
    graph.replay()
    assert torch.equal(y, reference.gemm(a, b, torch.float32, None))


@pytest.mark.skipif(not HOPPER, reason="needs sm_90")
def test_large_gemms_agree_under_every_configuration() -> None:
    """Many tiles a program; 14 bits where nothing is promoted."""
    a, b = on_device(cast(1000, 2000, PER_ROW)), on_device(cast(700, 2000, PER_ROW))
    truth = reference.gemm(a, b, torch.float32, None)
    for config in configs(a, b, torch.bfloat16, fast_accum=True):
        y = run(a, b, torch.bfloat16, None, config).float()
        assert (y - truth).norm() < 0.01 * truth.norm(), config
