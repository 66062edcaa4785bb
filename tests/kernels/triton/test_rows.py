"""Rows made inside the cast, by layers: forward and gradients have the bits of rows that were made first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.kernels.triton import quantize as triton_quantize
from ottava.kernels.triton import rows as triton_rows
from ottava.kernels.triton.quantize import UnmadeRows
from ottava.kernels.triton.rows import supports_norm, supports_rows
from ottava.recipe import RECIPES
from triton_mode import DEVICE, ON_GPU, with_triton

pytestmark = with_triton()


def samples(m: int, k: int) -> Tensor:
    return (torch.randn(m, k, generator=torch.Generator().manual_seed(m * k)) * 2).bfloat16().to(DEVICE)


def fuse(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets the interpreter stand for a GPU; what it is asked to cast."""
    asked: list[str] = []
    original = triton_quantize.plan_both

    def counted(x: Any, *rest: Any) -> Any:
        made = isinstance(x, UnmadeRows)
        asked.append(f"{'dx' if x.is_gradient else 'rows'} of {x.make}" if made else "tensor")
        return original(x, *rest)

    for home in (ottava.nn.norms, ottava.nn.activations):
        monkeypatch.setattr(home, "supports_rows", lambda *_: None)
    monkeypatch.setattr(ottava.nn.activations, "supports_gradient", lambda *_, **__: None)
    monkeypatch.setattr(triton_quantize, "supports_quantize", lambda *_: None)
    monkeypatch.setattr(triton_quantize, "plan_both", counted)
    return asked


def watch_doors(mlp: ottava.nn.NormMLP) -> None:
    """Who watches a door wants the rows made."""
    for layer in (mlp.fc1, mlp.fc2):
        for door in layer.quantizers.doors:
            door.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("activation", "recipe", "save", "bias"),
    [("gelu", "tensorwise", "bf16", False), ("gelu", "delayed", "fp8", False), ("swiglu", "mxfp8", "recompute", False)]
    + [("swiglu", "rowwise_with_gw_hp", "bf16", False), ("swiglu", "tensorwise", "bf16", False)]
    + [("gelu", "tensorwise", "bf16", True)],
)
def test_an_mlp_that_makes_its_rows_in_the_cast_has_the_bits_of_one_that_does_not(
    activation: str, recipe: str, save: Any, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and every gradient: fused; made first because someone watches the door; and near torch's own rows."""
    asked: list[str] = []
    results: dict[str, list[Tensor]] = {}
    for way in ("torch", "fused", "watched"):
        if way == "torch" and ON_GPU:
            continue
        if way == "fused" and not ON_GPU:
            asked = fuse(monkeypatch)
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"activation": activation, "norm": "rmsnorm", "bias": bias, "save": save}
        mlp = ottava.nn.NormMLP(48, 64, **sizes, recipe=recipe, dtype=torch.bfloat16).to(DEVICE)
        if way == "watched":
            watch_doors(mlp)
        x = samples(20, 48).view(4, 5, 48).requires_grad_()
        y = mlp(x)
        y.float().square().sum().backward()
        results[way] = [y.detach(), x.grad, *(p.grad for p in mlp.parameters())]
        if way == "fused" and not ON_GPU:
            act = {"swiglu": "silu"}.get(activation, activation)
            made = {"rows of rmsnorm", f"rows of {act}"} if save != "recompute" else {"rows of rmsnorm"}
            # a gate's gradient has a kernel of its own, and so does one whose sum is asked for
            made = made | ({f"dx of {act}"} if not bias and activation != "swiglu" else set())
            assert set(asked) - {"tensor"} == (set() if RECIPES[recipe].wgrad.rhs is None else made)
            notes = [row.note for row in ottava.receipt(mlp).rows if row.layer == "fc1" and row.gemm != "fprop"]
            fused = "one kernel makes and casts the gradient"
            assert all(fused in note for note in notes) == (f"dx of {act}" in asked)
    assert all(map(torch.equal, results["fused"], results["watched"]))
    for got, expected in zip(results["fused"], results.get("torch", results["fused"]), strict=True):
        # a row's rstd may differ by an ulp of fp32, a BF16 number then by one of its own, and a code by one of E4M3
        assert (got - expected).norm() <= 2**-4 * expected.norm()


def test_whoever_looks_at_a_gradient_gets_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook between the layers, a second reader, a leaf, and autograd.grad get a gradient that was made first."""
    sizes: dict[str, Any] = {"activation": "gelu", "bias": False, "dtype": torch.bfloat16}

    def results(fused: bool) -> list[Tensor]:
        torch.manual_seed(0)
        mlp = ottava.nn.NormMLP(32, 32, **sizes).to(DEVICE)
        if not fused:
            watch_doors(mlp)
        x, seen = samples(4, 32).requires_grad_(), []
        h = mlp.fc1(x)
        h.register_hook(lambda grad: seen.append(grad + 0))
        (mlp.fc2(h).sum() + h.float().square().sum()).backward()  # two gradients, which autograd adds
        seen += [mlp.fc1.weight.grad]
        h = mlp.fc1(x)
        h.retain_grad()
        handle = mlp.fc1.register_full_backward_hook(lambda _, __, out: seen.append(out[0] * 1))
        mlp(x).sum().backward()
        handle.remove()
        leaf = samples(4, 32).requires_grad_()
        mlp.fc2(leaf).sum().backward()
        h = mlp.fc1(x)
        seen += [leaf.grad, *torch.autograd.grad(mlp.fc2(h).sum(), (h,))]
        assert all(type(one) is Tensor for one in seen)
        return seen

    if not ON_GPU:
        fuse(monkeypatch)
    assert all(map(torch.equal, results(True), results(False)))


def test_refusals_say_why() -> None:
    """No device, an unknown formula, a wider dtype, rows that lie apart."""
    x = torch.ones(4, 4)
    assert supports_rows("silu", x, x.dtype) == "triton: runs on cuda; got cpu"
    assert supports_rows("mish", x, x.dtype) == f"triton: makes {', '.join(triton_rows.MADE)}; got mish"
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(4, 4, device="cuda", dtype=torch.bfloat16)
        assert "none wider than x; got torch.bfloat16 to torch.float32" in str(supports_rows("silu", x, torch.float32))
        assert "got (4, 4), strides (1, 4)" in str(supports_rows("silu", x.t(), x.dtype))


def test_norms_alone_are_fp64s_within_the_roundings_of_torchs_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and every gradient of odd shapes, each dtype, a weight of another dtype and one centred at 0.

    The bound is that of torch's lines in tests/nn/test_norms.py: eps of fp32 times the length of a sum.
    """
    if not ON_GPU:
        monkeypatch.setattr(ottava.nn.norms, "supports_norm", lambda *_: None)
        monkeypatch.setattr(triton_rows, "filling", lambda device: 3)
    asked: list[str] = []
    original = triton_rows.norm_gradient
    monkeypatch.setattr(ottava.nn.norms, "norm_gradient", lambda *a, **k: (asked.append("dx"), original(*a, **k))[1])
    eps = torch.finfo(torch.float32).eps
    for name, theirs in (("rmsnorm", nn.RMSNorm), ("layernorm", nn.LayerNorm)):
        for dtype, weight_dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32)):
            for shape, centred in (((7, 33), False), ((2, 3, 130), True), ((1, 64), False)):
                own = ottava.nn.norms.make_norm(name, shape[-1], zero_centered_gamma=centred, dtype=weight_dtype)
                other = theirs(shape[-1], eps=1e-5, dtype=torch.float64).to(DEVICE)
                with torch.no_grad():
                    for parameter in own.to(DEVICE).parameters():
                        parameter.normal_()
                    other.load_state_dict({key: value.double() for key, value in own.state_dict().items()})
                    other.weight += float(centred)
                x = (torch.randn(shape, device=DEVICE) * 3 + 1).to(dtype).requires_grad_()
                x64, dy = x.detach().double().requires_grad_(), torch.randn(shape, device=DEVICE).to(dtype)
                y, exact = own(x), other(x64)
                y.backward(dy)
                exact.backward(dy.double())
                near = 64 * shape[-1] * eps * (1 + float((x64.detach() ** 2).mean(-1).sqrt().max()))
                rows = x.numel() // shape[-1]
                pairs = [(y, exact, near), (x.grad, x64.grad, near)]
                pairs += [
                    (one.grad, two.grad, near + 16 * rows * eps)
                    for one, two in zip(own.parameters(), other.parameters(), strict=True)
                ]
                for got, true, bound in pairs:
                    limit = bound * (float(true.abs().max()) + 1) + torch.finfo(got.dtype).eps * true.abs()
                    assert torch.all((got.double() - true).abs() <= limit), (name, dtype, shape)
    assert len(asked) == 12


def test_a_norm_alone_refuses_what_it_does_not_read() -> None:
    x = torch.ones(4, 4)
    assert supports_norm(x) == "triton: runs on cuda; got cpu"
    with torch._subclasses.FakeTensorMode():
        wide = torch.empty(2, 32_768, device="cuda", dtype=torch.bfloat16)
        assert "norms up to 16384 numbers" in str(supports_norm(wide))
        assert "strides (1, 4)" in str(supports_norm(torch.empty(4, 4, device="cuda").t()))
        assert "got torch.float64 4" in str(supports_norm(torch.empty(4, 4, device="cuda", dtype=torch.float64)))
