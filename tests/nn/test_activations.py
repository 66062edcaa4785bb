"""Every entry of the table against fp64 formulas, against torch's autograd, and with its input kept in FP8."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

import ottava
from ottava.engine.functional import produced
from ottava.nn.activations import (
    ACTIVATIONS,
    KEPT,
    Activation,
    ActivationFormula,
    clamped_swiglu,
    gated,
    get_activation,
)

SQRT_2, TANH = math.sqrt(2), math.sqrt(2 / math.pi)
TRUTH: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / SQRT_2)),
        "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(TANH * (x + 0.044715 * x**3))),
        "silu": lambda x: x / (1 + torch.exp(-x)),
        "relu": lambda x: x * (x > 0),
        "relu2": lambda x: x * x * (x > 0),
        "qgelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    }
)
GATE: Mapping[str, str] = MappingProxyType(
    {
        "geglu": "gelu",
        "geglu_tanh": "gelu_tanh",
        "swiglu": "silu",
        "reglu": "relu",
        "sreglu": "relu2",
        "qgeglu": "qgelu",
    }
)


def truth(name: str, x: Tensor) -> Tensor:
    """In fp64, differentiable."""
    if name in TRUTH:
        return TRUTH[name](x)
    gate, up = x.chunk(2, -1)
    if name == "glu":
        return up / (1 + torch.exp(-gate))
    if name == "clamped_swiglu":
        gate = torch.minimum(gate, torch.tensor(7.0))
        up = torch.maximum(torch.minimum(up, torch.tensor(7.0)), -torch.tensor(7.0))
        return (up + 1) * gate / (1 + torch.exp(-1.702 * gate))
    return TRUTH[GATE[name]](gate) * up


def test_every_entry_is_its_formula_and_its_derivative() -> None:
    """fp64 within 32 roundings; 16 bits within four of their own, for what is rounded between gate and up."""
    for name, activation in ACTIVATIONS.items():
        assert activation.name == name
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            for shape in ((6, 64), (2, 3, 10), (64,), (0, 8), (3, 2)):
                x = (torch.randn(shape) * 4).to(dtype)
                x64 = x.double().requires_grad_()
                exact = truth(name, x64)
                dy = torch.randn(exact.shape).to(dtype)
                (dx64,) = torch.autograd.grad(exact, x64, dy.double())
                y, dx = activation.forward(x), activation.backward(dy, x)
                assert (y.dtype, dx.dtype, y.shape, dx.shape) == (dtype, dtype, exact.shape, x.shape)
                info = torch.finfo(dtype)
                inner = 32 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
                for got, want in ((y, exact), (dx, dx64)):
                    largest = float(want.abs().max()) if want.numel() else 0.0
                    few = 4 * info.eps * want.abs() + inner * (1 + largest) + info.smallest_normal
                    assert torch.all((got.double() - want).abs() <= few), (name, dtype)


def test_gradients_are_autograds_bits_where_torch_has_the_kernels() -> None:
    """So a fused layer trains as the same lines of plain torch."""
    for name, activation in ACTIVATIONS.items():
        if "qge" in name or name in ("clamped_swiglu", "glu"):
            continue
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = (torch.randn(9, 66) * 3).to(dtype).requires_grad_()
            y = activation.forward(x)
            dy = torch.randn_like(y)
            assert torch.equal(torch.autograd.grad(y, x, dy)[0], activation.backward(dy, x.detach())), name


def test_an_input_kept_in_fp8_gives_the_gradient_at_its_rounded_numbers() -> None:
    """Exactly; forward untouched; 1 byte an element and 4 a block are kept."""
    for name in ("gelu", "swiglu", "clamped_swiglu"):
        for shape in ((5, 256), (2, 3, 260), (0, 64)):
            x = torch.randn(shape).bfloat16().requires_grad_()
            formula = ActivationFormula(ACTIVATIONS[name], "fp8")
            kept: list[Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
                y = produced(formula, x)
            assert torch.equal(y, ACTIVATIONS[name].forward(x.detach()))
            rounded = ottava.quantize(x.detach().flatten(0, -2), KEPT)
            assert sum(t.nbytes for t in kept) == rounded.data.nbytes + rounded.scale_inv.nbytes
            dy = torch.randn_like(y)
            y.backward(dy)
            at = rounded.dequantize(torch.bfloat16).view(shape)
            assert x.grad is not None
            assert torch.equal(x.grad, ACTIVATIONS[name].backward(dy, at))


def test_one_entry_is_a_new_activation_and_wrong_ones_are_named() -> None:
    """An Activation of the user's works wherever a name does."""
    own = gated("expglu", Activation("exp", torch.exp, lambda dy, x: dy * x.exp()))
    mlp = ottava.nn.NormMLP(32, 32, activation=own, recipe="bf16")
    mlp(torch.randn(3, 32)).sum().backward()
    assert mlp.fc1.weight.shape == (64, 32)
    assert get_activation(own) is own
    assert clamped_swiglu(limit=1.0).forward(torch.tensor([[9.0, 9.0]])) < 2.0
    with pytest.raises(ValueError, match="swiglu"):
        get_activation("swigul")
    with pytest.raises(ValueError, match="even number"):
        produced(ActivationFormula(ACTIVATIONS["swiglu"]), torch.zeros(2, 5))
