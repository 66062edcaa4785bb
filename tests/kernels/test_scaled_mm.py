"""torch's scaled GEMM, on a CPU here: the same codes through somebody else's kernel, and refusals that are CUDA's.

These tests call the backend that Hopper runs, its padding included. What CUDA's kernel computes is tested where there
is one (-m gpu).
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.operands import Float64Gemm, Pair, cast
from ottava.kernels import reference, scaled_mm
from ottava.numerics.formats import BF16, E2M1, E2M3, E4M3, E4M3FNUZ, E5M2, E8M0
from ottava.numerics.scaling import (
    BLOCK_1X16,
    BLOCK_1X32,
    BLOCK_1X128,
    BLOCK_128X128,
    PER_ROW,
    PER_TENSOR,
    Granularity,
)
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.recipe import RECIPES
from sweep import sweep

TENSOR, ROW, E5 = QuantizationSpec(E4M3), QuantizationSpec(E4M3, PER_ROW, "pow2"), QuantizationSpec(E5M2)
TAKEN = {
    f"{gemm.lhs} x {gemm.rhs}": (gemm.lhs, gemm.rhs)
    for name in ("tensorwise", "tensorwise_e4m3", "rowwise", "rowwise_with_gw_hp")
    for gemm in (RECIPES[name].fprop, RECIPES[name].dgrad, RECIPES[name].wgrad)
    if gemm.lhs is not None and gemm.rhs is not None
}


@pytest.fixture(params=TAKEN.values(), ids=TAKEN.keys())
def taken(request: pytest.FixtureRequest) -> Pair:
    """Every pair of specs that torch's scaled GEMM takes, of all recipes."""
    return request.param


@pytest.mark.scaled_mm_on_cpu
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("k", [1, 15, 16, 100, 256])
@pytest.mark.parametrize("m, n", [(1, 1), (5, 17), (32, 48)])
def test_the_same_codes_give_the_reference_to_one_ulp(
    taken: Pair, m: int, n: int, k: int, with_bias: bool, float64_gemm: Float64Gemm
) -> None:
    """bf16 outputs: a bf16 ulp beside the reference, where fp32 sums do not cancel; padded sizes included."""
    a, b = cast(torch.randn(m, k), taken[0]), cast(torch.randn(n, k), taken[1])
    bias = torch.randn(n).bfloat16() if with_bias else None
    assert scaled_mm.supports_gemm(a, b, torch.bfloat16, bias) is None
    y, truth = (kernel.gemm(a, b, torch.bfloat16, bias) for kernel in (scaled_mm, reference))
    assert (y.shape, y.dtype, y.is_contiguous()) == (truth.shape, truth.dtype, True)
    _, accumulation = float64_gemm(a, b, bias)
    ulp = BF16.eps * truth.double().abs()
    assert ((y.double() - truth.double()).abs() <= ulp + 2 * accumulation).all()


@pytest.mark.scaled_mm_on_cpu
def test_padding_changes_no_sum() -> None:
    """K 100 -> 112 and N 17 -> 32 with zeros, scales of the new rows 1: the bits of a GEMM padded by hand."""
    for spec in (TENSOR, ROW):
        x, w = torch.randn(5, 100), torch.randn(17, 100)
        a, b = cast(x, spec), cast(w, spec)
        by_hand = [torch.nn.functional.pad(t, (0, 12, 0, rows)) for t, rows in ((x, 0), (w, 15))]
        aligned = scaled_mm.gemm(cast(by_hand[0], spec), cast(by_hand[1], spec), torch.bfloat16, None)
        assert torch.equal(scaled_mm.gemm(a, b, torch.bfloat16, None), aligned[:, :17])


@pytest.mark.parametrize(
    "n, k, text", [(16, 32, ""), (17, 32, "N 17->32"), (16, 100, "K 100->112"), (1, 1, "K 1->16, N 1->16")]
)
def test_padding_is_said(n: int, k: int, text: str) -> None:
    """What receipts print; M needs no alignment."""
    assert scaled_mm.padding(cast(torch.ones(3, k), TENSOR), cast(torch.ones(n, k), TENSOR)) == text


@pytest.mark.scaled_mm_on_cpu
def test_transposed_codes_are_taken() -> None:
    """dw = dy.T @ x with codes that are views: brought into the layouts of sm_90, the same bits as copies."""
    x_q, dy_q = cast(torch.randn(40, 24), TENSOR), cast(torch.randn(40, 56), E5)
    copies = [replace(t, data=t.data.t().contiguous(), scale_inv=t.scale_inv.t()) for t in (dy_q, x_q)]
    dw = scaled_mm.gemm(dy_q.t(), x_q.t(), torch.bfloat16, None)
    assert torch.equal(dw, scaled_mm.gemm(copies[0], copies[1], torch.bfloat16, None))


@pytest.mark.scaled_mm_on_cpu
def test_a_plan_has_the_bits_of_the_call(taken: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded, transposed and as CUDA wants it, which is torch's call alone; and whatever autocast is on around it."""
    alike = taken[0].granularity == taken[1].granularity
    for m, n, k in ((32, 48, 64), (5, 17, 100)):
        a, b = cast(torch.randn(m, k), taken[0]), cast(torch.randn(n, k), taken[1])
        turned = [replace(t, data=t.data.t().contiguous().t()) for t in (a, b)]
        for lhs, rhs, bias in ((a, b, None), (a, b, torch.randn(n).bfloat16()), (*turned, None)):
            truth = scaled_mm.gemm(lhs, rhs, torch.bfloat16, bias)
            with monkeypatch.context() as patch:
                if lhs is a and k == 64 and alike:
                    patch.setattr(scaled_mm, "gemm", None)
                run = scaled_mm.plan_gemm(lhs, rhs, torch.bfloat16, bias, False)
                with torch.autocast("cpu"):
                    y = run(lhs, rhs, bias)
            assert torch.equal(y, truth)
            assert y.stride() == truth.stride()


def test_a_cpu_is_taken_where_torch_has_a_kernel_for_it() -> None:
    """Asked of torch's dispatcher, and found out by a call: torch 2.11 offers the operator, and has it on CUDA only."""
    a = cast(torch.eye(16), TENSOR)
    reason = scaled_mm.supports_gemm(a, a, torch.bfloat16, None)
    try:
        y = scaled_mm.gemm(a, a, torch.bfloat16, None)
    except NotImplementedError:
        assert reason == f"scaled_mm: torch {torch.__version__} multiplies FP8 on cuda only; got cpu"
        assert not scaled_mm.runs_on_cpu()
    else:
        assert torch.equal(y, torch.eye(16).bfloat16())
        assert reason is None
        assert scaled_mm.runs_on_cpu()


REFUSALS: dict[str, tuple[QuantizationSpec, QuantizationSpec, torch.dtype, torch.dtype | None, str]] = {
    "E5M2 twice": (E5, E5, torch.bfloat16, None, "no tensor core multiplies E5M2 by E5M2"),
    "4 bits": (
        *[QuantizationSpec(E2M1, BLOCK_1X16, "e4m3")] * 2,
        torch.bfloat16,
        None,
        "takes E4M3 and E5M2, or both in FNUZ; got E2M1",
    ),
    "6 bits": (*[QuantizationSpec(E2M3)] * 2, torch.bfloat16, None, "takes E4M3 and E5M2, or both in FNUZ; got E2M3"),
    "16 bits": (*[QuantizationSpec(BF16)] * 2, torch.bfloat16, None, "takes E4M3 and E5M2, or both in FNUZ; got BF16"),
    "a scale": (*[QuantizationSpec(E8M0)] * 2, torch.bfloat16, None, "takes E4M3 and E5M2, or both in FNUZ; got E8M0"),
    "rows with 1x128": (ROW, QuantizationSpec(E4M3, BLOCK_1X128), torch.bfloat16, None, "got row and 1x128"),
    "squares twice": (*[QuantizationSpec(E4M3, BLOCK_128X128)] * 2, torch.bfloat16, None, "got 128x128 and 128x128"),
    "1x128, fp16": (
        *[QuantizationSpec(E4M3, BLOCK_1X128)] * 2,
        torch.float16,
        None,
        "blocks give bfloat16 and float32",
    ),
    "1x32": (*[QuantizationSpec(E4M3, BLOCK_1X32, "pow2")] * 2, torch.bfloat16, None, "got 1x32 and 1x32"),
    "rows, fp32": (ROW, ROW, torch.float32, None, r"per-row scales give bfloat16 only; got torch\.float32"),
    "one side rows, fp16": (TENSOR, ROW, torch.float16, None, r"per-row scales give bfloat16 only; got torch\.float16"),
    "fp32 with bias": (TENSOR, TENSOR, torch.float32, torch.float32, "bias must be of the output's 16-bit dtype"),
    "fp32 bias": (TENSOR, TENSOR, torch.bfloat16, torch.float32, "bias must be of the output's 16-bit dtype"),
}


@pytest.mark.parametrize("lhs, rhs, out_dtype, bias_dtype, message", REFUSALS.values(), ids=REFUSALS)
def test_refusals_are_the_same_on_cpu_and_cuda(
    lhs: QuantizationSpec, rhs: QuantizationSpec, out_dtype: torch.dtype, bias_dtype: Any, message: str
) -> None:
    """torch's CPU kernel would take some of them; tensors typed as CUDA's (fake ones, no GPU) hear the same words."""
    reasons = []
    for device in ("cpu", "cuda"):
        with FakeTensorMode():
            sides = []
            for spec in (lhs, rhs):
                grid = spec.granularity.grid_shape((32, 256))
                data = torch.empty(32, 256, dtype=spec.format.storage_dtype, device=device)
                sides.append(QuantizedTensor(data, torch.empty(grid, device=device), spec, torch.bfloat16))
            bias = None if bias_dtype is None else torch.empty(32, dtype=bias_dtype, device=device)
            reasons.append(scaled_mm.supports_gemm(sides[0], sides[1], out_dtype, bias))
    assert reasons[0] == reasons[1]
    assert reasons[0] is not None
    with pytest.raises(ValueError, match=message):
        raise ValueError(reasons[0])


@pytest.mark.parametrize("m, n, k", [(0, 16, 16), (16, 0, 16), (16, 16, 0)])
def test_empty_operands_are_refused(m: int, n: int, k: int) -> None:
    """cuBLASLt takes none; the reference gives zeros, or nothing."""
    a, b = cast(torch.ones(m, k), TENSOR), cast(torch.ones(n, k), TENSOR)
    assert scaled_mm.supports_gemm(a, b, torch.bfloat16, None) == "scaled_mm: an empty operand"


def test_other_devices_are_refused() -> None:
    """Named, so that `explain` can show it."""
    a = cast(torch.ones(16, 16), TENSOR)
    meta = replace(a, data=a.data.to("meta"), scale_inv=a.scale_inv.to("meta"))
    assert scaled_mm.supports_gemm(meta, meta, torch.bfloat16, None) == "scaled_mm: runs on cuda and cpu; got meta"


BLOCKS = {
    f"{lhs} x {rhs}": (QuantizationSpec(E4M3, lhs), QuantizationSpec(E4M3, rhs))
    for lhs, rhs in ((BLOCK_1X128, BLOCK_128X128), (BLOCK_128X128, BLOCK_1X128), (BLOCK_1X128, BLOCK_1X128))
}
AWKWARD = pytest.mark.parametrize("m, n, k", [(1, 1, 1), (3, 130, 100), (128, 256, 512), (129, 17, 640), (4, 16, 128)])


def as_scaled_blas_checks(scale: Tensor, granularity: Granularity, rows: int, k: int) -> bool:
    """Shape and strides as ScaledBlas.cpp checks them before it calls cuBLASLt."""
    per_k = -(-k // 128)
    shape = (rows, per_k) if granularity == BLOCK_1X128 else (-(-per_k // 4) * 4, -(-rows // 128))
    stride = shape[0] if scale.size(1) > 1 else scale.stride(1)
    strides_fit = scale.stride(0) == 1 and scale.stride(1) == stride and stride in (shape[0], 1)
    return scale.dtype == torch.float32 and tuple(scale.shape) == shape and strides_fit


@AWKWARD
@sweep(pair=BLOCKS.values())
def test_blocks_are_laid_out_as_hopper_wants_them(pair: Pair, m: int, n: int, k: int) -> None:
    """Sizes in multiples, A row-major and B column-major, scales outer dimension first; 16-byte strides of them."""
    ready = scaled_mm.arguments(cast(torch.randn(m, k), pair[0]), cast(torch.randn(n, k), pair[1]))
    (rows, inner), cols = ready.a.shape, ready.b.shape[1]
    assert (rows % 4, inner % 128, cols % 16, ready.b.shape[0]) == (0, 0, 0, inner)
    assert ready.a.is_contiguous()
    assert ready.b.t().is_contiguous()
    assert as_scaled_blas_checks(ready.scale_a, pair[0].granularity, rows, inner)
    assert as_scaled_blas_checks(ready.scale_b, pair[1].granularity, cols, inner)
    kinds = {BLOCK_1X128: "BlockWise1x128", BLOCK_128X128: "BlockWise128x128"}
    assert [ready.kind_a.name, ready.kind_b.name] == [kinds[spec.granularity] for spec in pair]


@AWKWARD
@sweep(pair=BLOCKS.values())
def test_what_is_handed_over_means_the_same(pair: Pair, m: int, n: int, k: int, float64_gemm: Float64Gemm) -> None:
    """The arguments multiplied by the definition, in fp64 by other code: padding and layout lose nothing."""
    a, b = cast(torch.randn(m, k), pair[0]), cast(torch.randn(n, k), pair[1])
    ready = scaled_mm.arguments(a, b)
    values = []
    for codes, scale, spec in ((ready.a, ready.scale_a, pair[0]), (ready.b.t(), ready.scale_b, pair[1])):
        entries = scale if spec.granularity == BLOCK_1X128 else scale.t().repeat_interleave(128, 0)
        entries = entries.repeat_interleave(128, 1)[: codes.shape[0], : codes.shape[1]]
        values.append(codes.double() * entries.double())
    exact, _ = float64_gemm(a, b, None)
    assert torch.allclose((values[0] @ values[1].t())[:m, :n], exact, rtol=0.0, atol=1e-10)


@sweep(pair=BLOCKS.values())
def test_blocks_are_refused_on_a_cpu_and_say_their_padding(pair: Pair) -> None:
    """torch's CPU version has none; the receipt on Hopper names all three sizes."""
    a, b = cast(torch.randn(5, 200), pair[0]), cast(torch.randn(17, 200), pair[1])
    reason = "scaled_mm: torch multiplies blocks of 128 on cuda only; got cpu"
    assert scaled_mm.supports_gemm(a, b, torch.bfloat16, None) == reason
    assert scaled_mm.padding(a, b) == "M 5->8, K 200->256, N 17->32"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "out_dtype, with_bias", [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)]
)
@AWKWARD
@pytest.mark.parametrize("pair", BLOCKS.values(), ids=BLOCKS)
def test_blocks_agree_with_the_reference_on_hopper(
    pair: Pair, m: int, n: int, k: int, out_dtype: torch.dtype, with_bias: bool, float64_gemm: Float64Gemm
) -> None:
    """Every pair, ragged sizes, bias; within the short accumulator of one block of K."""
    a, b = cast(torch.randn(m, k), pair[0]), cast(torch.randn(n, k), pair[1])
    bias = torch.randn(n).bfloat16() if with_bias else None
    exact, _ = float64_gemm(a, b, bias)
    magnitude = torch.ones_like(exact) * exact.abs().amax() + k
    on_gpu = [replace(t, data=t.data.cuda(), scale_inv=t.scale_inv.cuda()) for t in (a, b)]
    reason = scaled_mm.supports_gemm(on_gpu[0], on_gpu[1], out_dtype, None)
    if reason is not None:
        pytest.skip(reason)
    y = scaled_mm.gemm(on_gpu[0], on_gpu[1], out_dtype, None if bias is None else bias.cuda()).cpu()
    assert (y.dtype, tuple(y.shape)) == (out_dtype, (m, n))
    assert ((y.double() - exact).abs() <= 2.0**-12 * magnitude + BF16.eps / 2 * exact.abs()).all()


@pytest.mark.gpu
def test_tensor_cores_agree_with_the_reference(taken: Pair, float64_gemm: Float64Gemm) -> None:
    """On Hopper: 14 bits are kept between promotions (2**-13 of sum |a||b|), slow accumulation, padded sizes."""
    a, b = cast(torch.randn(65, 1000), taken[0]), cast(torch.randn(77, 1000), taken[1])
    exact, _ = float64_gemm(a, b, None)
    _, magnitude = float64_gemm(*(replace(t, data=t.data.float().abs().to(t.data.dtype)) for t in (a, b)), None)
    on_gpu = [replace(t, data=t.data.cuda(), scale_inv=t.scale_inv.cuda()) for t in (a, b)]
    y = scaled_mm.gemm(on_gpu[0], on_gpu[1], torch.bfloat16, None).cpu().double()
    magnitude = magnitude / ((1000 + 6) * 2.0**-24)  # the fixture scales it to a bound
    assert ((y - exact).abs() <= 2.0**-13 * magnitude + BF16.eps / 2 * exact.abs()).all()


def test_mx_scales_lie_as_cublas_describes() -> None:
    """Byte by byte from the formula of cuBLAS's page; ragged sizes, a NaN block, the smallest scale."""
    spec = QuantizationSpec(E4M3, BLOCK_1X32, "e8m0")
    for rows, k in ((1, 32), (5, 200), (130, 512), (256, 128)):
        x = torch.randn(rows, k) * torch.exp2(torch.arange(rows)[:, None] % 60 - 30.0)
        x[0, 0] = float("inf")
        x[-1, -32:] *= 2.0**-120
        cast_x = cast(x, spec)
        got = scaled_mm.swizzled(cast_x.scale_inv)
        blocks = -(-k // 32)
        across = -(-blocks // 4)
        assert got.dtype == torch.float8_e8m0fnu
        assert got.numel() == -(-rows // 128) * 128 * across * 4
        numbers, seen = got.float(), set()
        for r in range(rows):
            for j in range(blocks):
                place = ((r // 128) * across + j // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + j % 4
                seen.add(place)
                assert torch.equal(numbers[place], cast_x.scale_inv[r, j]) or (
                    numbers[place].isnan() and cast_x.scale_inv[r, j].isnan()
                )
        assert all(int(got.view(torch.uint8)[place]) == 0 for place in range(got.numel()) if place not in seen)


def test_mx_is_blackwells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments as ScaledBlas.cpp checks them; never run: no Blackwell was at hand."""
    spec = QuantizationSpec(E4M3, BLOCK_1X32, "e8m0")
    a, b = cast(torch.randn(5, 200), spec), cast(torch.randn(17, 200), spec)
    assert "blocks of 1x32 on cuda only; got cpu" in str(scaled_mm.supports_gemm(a, b, torch.bfloat16, None))
    assert "1x32 scales give bfloat16 only" in str(scaled_mm.supports_gemm(a, b, torch.float32, None))
    ready = scaled_mm.arguments(a, b)
    assert (tuple(ready.a.shape), tuple(ready.b.shape)) == ((5, 224), (224, 32))
    assert ready.scale_a.numel() == ready.scale_b.numel() == 128 * 8
    with FakeTensorMode():
        far = [
            replace(t, **{name: torch.empty(one.shape, dtype=one.dtype, device="cuda") for name, one in held.items()})
            for t, held in ((t, {"data": t.data, "scale_inv": t.scale_inv}) for t in (a, b))
        ]
    for capability, expected in (((10, 0), "None"), ((9, 0), "Blackwell's (sm_100); this device is sm_90")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert expected in str(scaled_mm.supports_gemm(*far, torch.bfloat16, None))


@pytest.mark.parametrize("granularity", [PER_TENSOR, PER_ROW, BLOCK_1X128], ids=str)
def test_each_card_of_amd_takes_its_own_formats(granularity: Granularity, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's documentation has it; never run: no MI300 was at hand."""
    x, answers = torch.randn(32, 256), {}
    for fmt in (E4M3, E4M3FNUZ):
        a = cast(x, QuantizationSpec(fmt, granularity))
        with FakeTensorMode():
            held = {"data": a.data, "scale_inv": a.scale_inv}
            a = replace(a, **{name: torch.empty(t.shape, dtype=t.dtype, device="cuda") for name, t in held.items()})
        for card, hip in (("", None), ("gfx90a", "6.4"), ("gfx942:sramecc+:xnack-", "6.4"), ("gfx950", "7.0")):
            monkeypatch.setattr(torch.version, "hip", hip)
            monkeypatch.setattr(torch.version, "cuda", "12.9")
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
            found = SimpleNamespace(gcnArchName=card)
            monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=found: found)
            answers[fmt, card[:6]] = scaled_mm.supports_gemm(a, a, torch.bfloat16, None)
    runs = {place for place, reason in answers.items() if reason is None}
    whole = {(E4M3FNUZ, "gfx942"), (E4M3, "gfx950")} if granularity != BLOCK_1X128 else set()
    assert runs == whole | {(E4M3, "")}
    assert "only that card; got E4M3 on gfx942" in str(answers[E4M3, "gfx942"])
    assert "those of AMD's MI300" in str(answers[E4M3FNUZ, ""])
    if whole:
        assert "this device is gfx90a" in str(answers[E4M3, "gfx90a"])
