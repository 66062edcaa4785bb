"""GEMMs: who runs, what is refused and logged, and that nothing around them changes a bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import ottava
from kernels.operands import Float64Gemm, Pair, raw
from kernels.operands import quantized as cast
from ottava.kernels import gate, reference, scaled_mm
from ottava.numerics.accumulator import Accumulator
from ottava.numerics.formats import E2M1, E4M3, E5M2
from ottava.numerics.scaling import BLOCK_1X128, BLOCK_128X128, PER_ROW
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.numerics.transforms import Mean
from ottava.ops import dispatch
from ottava.ops import gemm as gemms
from ottava.ops.gemm import GemmRecord, explain, gemm, rests, whole
from ottava.ops.quantize import quantize
from sweep import sweep

E4, E5 = QuantizationSpec(E4M3), QuantizationSpec(E5M2)


def operands(pair: Pair, m: int = 5, n: int = 7, k: int = 300) -> tuple[QuantizedTensor, QuantizedTensor]:
    return cast(torch.randn(m, k), pair[0]), cast(torch.randn(n, k), pair[1])


# --- quantize --------------------------------------------------------------------------------------------------------


def test_a_plan_is_kept_at_low_addresses_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may hand them out; at address 0 there is no memory, and no plan is kept."""
    for home in (gate, gemms):
        monkeypatch.setattr(home, "LOWEST", 1 << 62)
    layer = ottava.nn.Linear(16, 16, recipe="tensorwise", dtype=torch.bfloat16)
    layer(torch.ones(16, 16).bfloat16())
    kept = dict(layer.plans)
    layer(torch.ones(16, 16).bfloat16())
    layer(torch.ones(0, 16).bfloat16())
    assert layer.plans == kept != {}


@sweep
def test_every_pair_of_every_recipe_multiplies(
    pair: Pair, sizes: tuple[int, int, int], dtype: torch.dtype, float64_gemm: Float64Gemm
) -> None:
    """Any size, nothing included: the bits of the kernel that the log names; asked for, those of the reference."""
    a, b = operands(pair, *sizes)
    bias = torch.randn(sizes[1]).to(dtype)
    records: list[GemmRecord] = []
    y = gemm(a, b, out_dtype=dtype, bias=bias, log=records.append)
    assert torch.equal(y, gemm(a, b, out_dtype=dtype, bias=bias, backend=records[0].kernel))
    truth = reference.gemm(a, b, dtype, bias)
    assert torch.equal(gemm(a, b, out_dtype=dtype, bias=bias, backend="reference"), truth)
    _, accumulation = float64_gemm(a, b, bias)
    ulp = torch.finfo(dtype).eps * truth.double().abs() + torch.finfo(dtype).smallest_normal
    assert ((y.double() - truth.double()).abs() <= 2 * accumulation + ulp).all()


@sweep
def test_unquantized_operands_multiply_as_in_torch(dtype: torch.dtype) -> None:
    """Passed through: torch.mm and torch.addmm, bit for bit, and the dtype asked for."""
    a, b, bias = torch.randn(5, 30).to(dtype), torch.randn(7, 30).to(dtype), torch.randn(7).to(dtype)
    assert torch.equal(gemm(a, b, out_dtype=dtype), a @ b.t())
    assert torch.equal(gemm(a, b, out_dtype=dtype, bias=bias), torch.addmm(bias, a, b.t()))
    assert gemm(a, b, out_dtype=torch.float32).dtype == torch.float32


@sweep
def test_ambient_autocast_changes_no_bit(pair: Pair, dtype: torch.dtype) -> None:
    """torch.autocast(bfloat16) would turn the fp32 accumulation into BF16."""
    x, w = torch.randn(5, 300).to(dtype), torch.randn(7, 300).to(dtype)

    def run() -> tuple[Tensor, ...]:
        a, b = cast(x, pair[0]), cast(w, pair[1])
        y = gemm(a, b, out_dtype=torch.float32)
        return raw(a), a.scale_inv, y, gemm(x, w, out_dtype=dtype), gemm(a, b, out_dtype=dtype, compute="bf16")

    outside = run()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, outside, run()))
        assert torch.is_autocast_enabled("cpu")


@sweep
def test_default_dtype_changes_no_bit(pair: Pair) -> None:
    """Models are often built under torch.set_default_dtype(bfloat16); scales stay fp32 in it."""
    x, w = torch.randn(5, 300), torch.randn(7, 300)

    def run() -> tuple[Tensor, ...]:
        a, b = cast(x, pair[0]), cast(w, pair[1])
        return raw(a), a.scale_inv, b.scale_inv, gemm(a, b, out_dtype=torch.float32)

    outside = run()
    torch.set_default_dtype(torch.bfloat16)
    try:
        inside = run()
    finally:
        torch.set_default_dtype(torch.float32)
    assert [t.dtype for t in inside] == [t.dtype for t in outside]
    assert all(map(torch.equal, outside, inside))


# --- which kernel ----------------------------------------------------------------------------------------------------


@sweep
def test_the_log_says_what_ran(pair: Pair) -> None:
    """Specs, sizes and kernel of a quantized GEMM, of one in BF16, and of one in high precision."""
    records: list[GemmRecord] = []
    a, b = operands(pair)
    gemm(a, b, out_dtype=torch.bfloat16, log=records.append)
    gemm(a, b, out_dtype=torch.bfloat16, compute="bf16", log=records.append)
    gemm(torch.ones(2, 3), torch.ones(4, 3), out_dtype=torch.float32, log=records.append)
    specs = (str(pair[0]), str(pair[1]))
    first = next(line for line in explain(a, b, out_dtype=torch.bfloat16).splitlines() if line.endswith(": runs"))
    assert records[0].kernel == first.removesuffix(": runs")
    assert len(records[0].refusals) == [kernel.NAME for kernel in dispatch.gemm_kernels(a.device)].index(
        records[0].kernel
    )
    anew = replace(records[0], kernel="", refusals=())
    assert anew == GemmRecord(*specs, 5, 7, 300, "", True, False, "", (), "bfloat16")
    dense = dispatch.choose_dense(a.dequantize(torch.bfloat16), b.dequantize(torch.bfloat16))  # on this CPU
    kernel, refusals = f"{dense[0].NAME} bfloat16", dense[1]
    assert records[1] == GemmRecord(*specs, 5, 7, 300, kernel, True, False, "", refusals, "bfloat16")
    assert records[2] == GemmRecord("float32", "float32", 2, 4, 3, "torch.mm float32", False, False, "", (), "float32")


@pytest.mark.scaled_mm_on_cpu
def test_a_backend_asked_for_runs() -> None:
    """By name; the log says that it is native and what it padded."""
    a, b = operands((E4, E5))
    records: list[GemmRecord] = []
    y = gemm(a, b, out_dtype=torch.bfloat16, backend="scaled_mm", log=records.append)
    assert torch.equal(y, scaled_mm.gemm(a, b, torch.bfloat16, None))
    assert (records[0].kernel, records[0].native, records[0].padding) == ("scaled_mm", True, "K 300->304, N 7->16")


def test_a_backend_that_cannot_is_no_reason_for_another() -> None:
    """Unknown: the nearest is named. Unsupporting: its reason. Nothing else runs in its place."""
    rows = cast(torch.randn(4, 32), QuantizationSpec(E4M3, PER_ROW))
    with pytest.raises(ValueError, match="gemm: unknown backend 'scaled_mn'; did you mean 'scaled_mm'"):
        gemm(rows, rows, out_dtype=torch.bfloat16, backend="scaled_mn")
    with pytest.raises(
        ValueError, match="backend 'scaled_mm' was asked for, but scaled_mm: per-row scales give bfloat16"
    ):
        gemm(rows, rows, out_dtype=torch.float32, backend="scaled_mm")


def test_explain_lists_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which runs, which could, which cannot and why; and refuses what gemm refuses."""
    a, rows = cast(torch.ones(2, 32), E4), cast(torch.ones(2, 32), QuantizationSpec(E4M3, PER_ROW))
    names = [kernel.NAME for kernel in dispatch.CPU_KERNELS]
    assert names == ["native_gemm", "bf16_mm", "native_decoded", "reference", "scaled_mm"]
    lines = explain(a, a, out_dtype=torch.bfloat16).splitlines()
    assert sorted(line.split(":")[0] for line in lines[:4]) == sorted(names[:4])  # in the order of their times
    assert sum(line.endswith(": runs") for line in lines) == 1
    chosen = next(line for line in lines if line.endswith(": runs")).split(":")[0]
    supported = f"scaled_mm: supported, but {chosen} comes first on cpu"
    assert lines[4] == (scaled_mm.supports_gemm(a, a, torch.bfloat16, None) or supported)
    assert lines[5] == f"measured: {dispatch.cpu_ranking()}"
    assert {
        "bf16_mm: torch's BF16 GEMM gives bfloat16 only; got torch.float16",
        "scaled_mm: per-row scales give bfloat16 only; got torch.float16",
    } < set(explain(rows, a, out_dtype=torch.float16).splitlines())
    monkeypatch.setattr(dispatch, "CPU_KERNELS", (scaled_mm, reference))
    assert explain(rows, a, out_dtype=torch.float16).splitlines() == [
        "scaled_mm: per-row scales give bfloat16 only; got torch.float16",
        "reference: runs",
        "measured: nothing, for there is one way only",
    ]
    with pytest.raises(ValueError, match=r"needs \(M, K\) and \(N, K\)"):
        explain(a, cast(torch.ones(2, 16), E4), out_dtype=torch.bfloat16)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "a, b, bias, message",
    [
        ((2, 3), (4, 5), None, r"got a \(2, 3\) and b \(4, 5\); needs \(M, K\) and \(N, K\)"),
        ((3,), (4, 3), None, "both are contracted over their last dimension"),
        ((2, 2, 3), (4, 3), None, "both are contracted over their last dimension"),
        ((2, 3), (4, 3), (2,), r"got bias \(2,\) .* needs \(4,\)"),
        ((2, 3), (4, 3), (1, 4), r"got bias \(1, 4\) .* needs \(4,\)"),
    ],
)
def test_wrong_shapes_are_refused(a: Any, b: Any, bias: Any, message: str) -> None:
    """Before anything is computed, with what is needed."""
    with pytest.raises(ValueError, match=message):
        gemm(torch.ones(a), torch.ones(b), out_dtype=torch.float32, bias=None if bias is None else torch.ones(bias))


BLOCK = QuantizationSpec(E4M3, BLOCK_128X128)
REFUSED: dict[str, tuple[QuantizationSpec | None, QuantizationSpec | None, str]] = {
    "E5M2 twice": (E5, E5, "no tensor core multiplies E5M2 by E5M2; make one of them E4M3"),
    "squares twice": (BLOCK, BLOCK, "make one of them 1x128"),
    "one side": (E4, None, r"E4M3\[tensor\] x high precision: .* quantize both or neither"),
    "the other side": (None, E4, "quantize both or neither"),
    "two widths": (E4, QuantizationSpec(E2M1), "both sides need one width"),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("lhs, rhs, message", REFUSED.values(), ids=REFUSED)
def test_pairs_are_refused_on_every_device(
    lhs: QuantizationSpec | None, rhs: QuantizationSpec | None, message: str, device: str
) -> None:
    """In the same words, on a CPU and on tensors typed as CUDA's (fake ones: no GPU is needed to be refused)."""
    with FakeTensorMode():
        sides: list[Tensor | QuantizedTensor] = []
        for spec in (lhs, rhs):
            x = torch.empty(16, 16, dtype=torch.bfloat16, device=device)
            if spec is not None:
                x = x.to(spec.format.storage_dtype)
            scale_inv = torch.empty(1, 1, device=device)
            sides.append(QuantizedTensor(x, scale_inv, spec, torch.bfloat16) if spec is not None else x)
        with pytest.raises(ValueError, match=message):
            gemm(sides[0], sides[1], out_dtype=torch.bfloat16)


def test_two_high_precisions_are_refused() -> None:
    """torch would say "expected m1 and m2 to have the same dtype"; this says what to do."""
    with pytest.raises(ValueError, match=r"got torch\.float32 and torch\.bfloat16 in high precision; cast one of them"):
        gemm(torch.ones(2, 3), torch.ones(4, 3).bfloat16(), out_dtype=torch.float32)


# --- inside torch.compile --------------------------------------------------------------------------------------------


@sweep(with_bias=[False, True])
def test_the_gemm_operator_keeps_torchs_contract(pair: Pair, with_bias: bool) -> None:
    """opcheck, and the bits of `gemm` outside a graph. Its test_schema multiplies FP8, which torch 2.13 cannot."""
    a, b = operands(pair)
    bias = torch.randn(7).bfloat16() if with_bias else None
    arguments = (a.data, a.scale_inv, a.spec.key, b.data, b.scale_inv, b.spec.key, torch.bfloat16, bias, False)
    arguments += ("", None)  # no accumulator, and nothing that it starts from
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.ottava.gemm.default, arguments, test_utils=checks)
    y = torch.ops.ottava.gemm(*arguments)
    assert torch.equal(y, gemm(a, b, out_dtype=torch.bfloat16, bias=bias))


def test_compiled_casts_and_gemms_give_eager_bits() -> None:
    """torch.compile(fullgraph=True) around both operations, views and bias included."""
    spec = QuantizationSpec(E4M3, BLOCK_1X128, "pow2")

    def forward(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return gemm(quantize(x.t(), spec), quantize(w, spec), out_dtype=torch.bfloat16, bias=bias)

    arguments = (torch.randn(300, 5).bfloat16(), torch.randn(7, 300).bfloat16(), torch.randn(7).bfloat16())
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments), forward(*arguments))


# --- parts that transforms set aside ---

PLAIN = QuantizationSpec(ottava.E4M3)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"accumulator": Accumulator(name="wide", group=8)},
    {"backend": "reference"},
)


def test_a_product_is_that_of_the_whole_operands() -> None:
    """Of decoded rests plus parts; two means along K leave their products with the other's rest out, which are 0."""
    means = (PLAIN, *(QuantizationSpec(ottava.E4M3, transform=Mean(tokens)) for tokens in ("rows", "columns")))
    x, w, bias = torch.randn(24, 40) + 20, torch.randn(16, 40) - 5, torch.randn(16)
    for lhs in means:
        for rhs in means:
            a, b = quantize(x, lhs), quantize(w, rhs)
            if lhs is rhs is PLAIN:
                assert rests(a, b) is None
                continue
            plain = rests(a, b)
            assert plain is not None
            assert rests(*plain) is None
            wanted = whole(a).double() @ whole(b).double().t() + bias
            if lhs.transform == rhs.transform == Mean("columns"):
                product = a.dequantize().double() @ b.dequantize().double().t()
                assert a.aside is not None
                assert b.aside is not None
                wanted = product + 40 * a.aside.double() @ b.aside.double().t() + bias
            for settings in SETTINGS:
                y = gemm(a, b, out_dtype=torch.float32, bias=bias, **settings)
                torch.testing.assert_close(y.double(), wanted, rtol=2e-6, atol=2e-3)
                rounded = gemm(a, b, out_dtype=torch.bfloat16, bias=bias, **settings)
                assert torch.equal(rounded, y.bfloat16())  # one rounding
            near = gemm(a, b, out_dtype=torch.float32, compute="bf16")
            exact = x.double() @ w.double().t()
            assert float((near.double() - exact).norm() / exact.norm()) < 0.03
            torch.testing.assert_close(whole(a, a.transformed(x)), x, rtol=0, atol=1e-5)


def test_a_tensor_that_was_not_cast_has_no_part() -> None:
    x = torch.randn(4, 8)
    cast = quantize(x, QuantizationSpec(ottava.E4M3, transform="mean"))  # type: ignore[arg-type]
    assert rests(x, x) is None
    found = rests(x, cast)
    assert found is not None
    assert found[0] is x
    assert found[1].aside is None  # type: ignore[union-attr]
