"""Which kernel is asked first, and that a new one is a file and an entry."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ottava.kernels import gemm_choice, reference
from ottava.kernels.gemm_choice import Ranking
from ottava.kernels.native import gemm as native_gemm
from ottava.numerics.formats import E4M3
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.ops import dispatch
from ottava.ops.gemm import explain, gemm, plan_gemm


def cast(x: Tensor) -> QuantizedTensor:
    spec = QuantizationSpec(E4M3)
    return QuantizedTensor(*reference.quantize(x, spec)[:2], spec, x.dtype)


def test_a_new_kernel_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the five names of the protocol and nothing else it is chosen, explained, and one of the ways to measure."""
    calls: list[Any] = []

    def own(*operands: Any) -> Tensor:
        calls.append(operands)
        return reference.gemm(*operands)

    new: Any = ModuleType("new")
    vars(new).update(NAME="new", NATIVE=False, supports_gemm=lambda *_: None, padding=lambda a, b: "", gemm=own)
    monkeypatch.setattr(dispatch, "CPU_KERNELS", (new, reference))
    monkeypatch.setattr(dispatch, "_in_order", lambda kernels, native: kernels)
    monkeypatch.setattr(dispatch, "_cpu_ranking", lambda kernels, native: Ranking(("new", "reference"), None, None))
    a = cast(torch.eye(2))
    assert torch.equal(gemm(a, a, out_dtype=torch.bfloat16), torch.eye(2).bfloat16())
    assert len(calls) == 1
    assert explain(a, a, out_dtype=torch.float32).startswith("new: runs")
    assert set(dispatch.gemm_ways(a, a, out_dtype=torch.float32)) == {"new"}


def test_kernels_on_a_cpu_are_tried_in_the_order_of_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were measured change places among themselves; torch's scaled GEMM, an oracle, stays where it is, and
    the kernel that makes the reference's bits stays right before it."""
    a = cast(torch.ones(4, 32))
    dispatch.cpu_ranking()  # measured before the clock is replaced
    for order in (("reference", "native_gemm AVX2", "bf16_mm"), ("bf16_mm", "reference"), ("reference",)):
        dispatch._cpu_ranking.cache_clear()
        dispatch._in_order.cache_clear()
        monkeypatch.setattr(gemm_choice, "rank", lambda *_, order=order: Ranking(order, None, None))
        names = [way.split()[0] for way in order]
        others = [kernel.NAME for kernel in dispatch.CPU_KERNELS if kernel.NAME not in names]
        got = [kernel.NAME for kernel in dispatch.gemm_kernels(a.device)]
        assert [name for name in got if name in names] == names
        assert sorted(name for name in got if name not in names) == sorted(others)
        assert (got[4], got.index("native_decoded")) == ("scaled_mm", got.index("reference") - 1)
    dispatch._cpu_ranking.cache_clear()
    dispatch._in_order.cache_clear()


def test_what_can_multiply_here_was_measured() -> None:
    """By name and level, none of it wrong; and `explain` says where the times are."""
    ranking = dispatch.cpu_ranking()
    assert {way.split()[0] for way in ranking.order} <= {"native_gemm", "bf16_mm", "reference"}
    assert "reference" in ranking.order
    assert ranking.choice is None or ranking.choice.failed == {}


def test_bf16_operands_go_to_the_fastest_that_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As measured, and explained; other dtypes and devices stay with torch, and so does whatever the winner refuses."""
    torch.manual_seed(0)
    a, b = torch.randn(5, 40).bfloat16(), torch.randn(7, 40).bfloat16()
    dispatch.dense_ranking()  # measured before the clock is replaced
    try:
        for order in (
            ("native_gemm AVX2", "reference", "torch.mm"),
            ("reference", "torch.mm"),
            ("torch.mm", "reference"),
        ):
            for cache in (dispatch._dense_ranking, dispatch._dense_in_order, dispatch.torch_is_beaten):
                cache.cache_clear()
            monkeypatch.setattr(gemm_choice, "rank", lambda *_, order=order, make: Ranking(order, None, None, "told"))
            first = order[0].split()[0]
            native = native_gemm.supports_dense(a, b)
            runs = order[1] if first == "native_gemm" and native else first
            assert dispatch.torch_is_beaten() == (first != "torch.mm")
            plan = plan_gemm(a, b, out_dtype=torch.float32)
            assert plan.record.kernel == f"{runs} bfloat16"
            assert plan.record.refusals == ((native,) if runs != first else ())
            shown = explain(a, b, out_dtype=torch.float32).splitlines()
            assert f"{runs}: runs" in shown
            assert shown[-1] == "measured: told"
            assert len(shown) == len(order) + 1
            y = gemm(a, b, out_dtype=torch.float32)
            exact = a.double() @ b.double().t()
            assert y.dtype == torch.float32
            assert torch.equal(y, y.bfloat16().float())  # one rounding, to the dtype of the operands
            assert (y - exact).abs().le(exact.abs() * 2**-8 + 1e-5).all()
            for x in (a.float(), a.half(), a.to("meta")):
                assert plan_gemm(x, x, out_dtype=x.dtype).record.kernel.startswith("torch.mm")
                assert explain(x, x, out_dtype=x.dtype) == "torch.mm: runs"
            empty = plan_gemm(a[:0], b, out_dtype=torch.bfloat16)
            assert empty.record.kernel != "native_gemm bfloat16"
            assert empty.run(a[:0], b, None).shape == (0, 7)
            decoded = plan_gemm(cast(a), cast(b), out_dtype=torch.bfloat16, compute="bf16")
            assert decoded.record.kernel == f"{runs} bfloat16"
    finally:
        for cache in (dispatch._dense_ranking, dispatch._dense_in_order, dispatch.torch_is_beaten):
            cache.cache_clear()
