"""Rows made inside the cast, by layers: forward and gradients have the bits of rows that were made first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ottava
from ottava.kernels.triton import quantize as triton_quantize
from ottava.kernels.triton import rows as triton_rows
from ottava.kernels.triton.quantize import UnmadeRows
from ottava.kernels.triton.rows import supports_rows
from ottava.recipe import RECIPES

pytest.importorskip("triton", reason="Triton has no build for this machine")
ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    from kernels.triton import interpreter as triton_interpreter

    triton_interpreter.install()
pytestmark = [pytest.mark.gpu] if ON_GPU else []
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


def samples(m: int, k: int) -> Tensor:
    return (torch.randn(m, k, generator=torch.Generator().manual_seed(m * k)) * 2).bfloat16().to(DEVICE)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "mxfp8", "rowwise_with_gw_hp"])
def test_an_mlp_that_makes_its_rows_in_the_cast_has_the_bits_of_one_that_does_not(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and every gradient: fused; made first because someone watches the door; and near torch's own rows."""
    asked: list[str] = []
    original = triton_quantize.quantize_both

    def counted(x: Any, *rest: Any) -> Any:
        asked.append(x.make if isinstance(x, UnmadeRows) else "tensor")
        return original(x, *rest)

    results: dict[str, list[Tensor]] = {}
    for way in ("torch", "fused", "watched"):
        if way == "fused" and not ON_GPU:
            for home in (ottava.nn.norms, ottava.nn.activations):
                monkeypatch.setattr(home, "supports_rows", lambda *_: None)
            monkeypatch.setattr(triton_quantize, "supports_quantize", lambda *_: None)
            monkeypatch.setattr(triton_quantize, "quantize_both", counted)
        if way == "torch" and ON_GPU:
            continue
        torch.manual_seed(0)
        mlp = ottava.nn.NormMLP(48, 64, activation="swiglu", norm="rmsnorm", recipe=recipe, dtype=torch.bfloat16)
        mlp = mlp.to(DEVICE)
        if way == "watched":
            for layer in (mlp.fc1, mlp.fc2):
                layer.quantizers.input.register_forward_hook(lambda *_: None)
        x = samples(20, 48).requires_grad_()
        y = mlp(x)
        y.float().square().sum().backward()
        results[way] = [y.detach(), x.grad, *(p.grad for p in mlp.parameters())]
        if way == "fused" and not ON_GPU:
            made = {"rmsnorm", "silu"} & set(asked)
            assert made == (set() if RECIPES[recipe].wgrad.rhs is None else {"rmsnorm", "silu"})
    assert all(map(torch.equal, results["fused"], results["watched"]))
    for got, expected in zip(results["fused"], results.get("torch", results["fused"]), strict=True):
        # a row's rstd may differ by an ulp of fp32, a BF16 number then by one of its own, and a code by one of E4M3
        assert (got - expected).norm() <= 2**-4 * expected.norm()


def test_refusals_say_why() -> None:
    """No device, an unknown formula, a wider dtype, rows that lie apart."""
    x = torch.ones(4, 4)
    assert supports_rows("silu", x, x.dtype) == "triton: runs on cuda; got cpu"
    assert supports_rows("mish", x, x.dtype) == f"triton: makes {', '.join(triton_rows.MADE)}; got mish"
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(4, 4, device="cuda", dtype=torch.bfloat16)
        assert "none wider than x; got torch.bfloat16 to torch.float32" in str(supports_rows("silu", x, torch.float32))
        assert "got (4, 4), strides (1, 4)" in str(supports_rows("silu", x.t(), x.dtype))
