"""Smooth-SwiGLU: not a bit changes in high precision, and the outlier that breaks one scale a tensor does no longer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import ottava
from ottava.nn import NormMLP
from ottava.nn.smoothing import fold_smooth_swiglu, smooth_swiglu
from ottava.serving.source import of_model

H, F = 64, 128


def with_an_outlier(recipe: str, dtype: torch.dtype = torch.bfloat16, **more: Any) -> NormMLP:
    """Gate and up rows of channel 5 align, and so does one token; the channel's column in fc2 is short."""
    torch.manual_seed(0)
    mlp = NormMLP(H, F, norm="rmsnorm", recipe=recipe, dtype=dtype, **({"activation": "swiglu"} | more))
    with torch.no_grad():
        mlp.fc1.weight[5] = mlp.fc1.weight[-F + 5] = 30 * direction()
        mlp.fc2.weight[:, 5] *= 2.0**-17
    return mlp


def direction() -> Tensor:
    return torch.nn.functional.normalize(torch.randn(H, generator=torch.Generator().manual_seed(2)), dim=0)


def sample(rows: int = 64) -> Tensor:
    x = torch.randn(rows, H, generator=torch.Generator().manual_seed(1))
    x[0] = direction()
    return x


def test_not_a_bit_changes_in_high_precision() -> None:
    """Output, dx and every gradient, that of fc2 by its power of two; all activations, all ways to save; twice."""
    x = sample()
    for activation in ("swiglu", "geglu", "clamped_swiglu", "gelu"):
        for dtype, save in ((torch.float32, "bf16"), (torch.bfloat16, "bf16"), (torch.bfloat16, "recompute")):
            mlp = with_an_outlier("bf16", dtype, activation=activation, save=save)
            results = []
            for fold in range(3):
                scale = smooth_swiglu(mlp, x.to(dtype)) if fold else torch.ones(F)
                leaf = x.to(dtype).detach().clone().requires_grad_()
                mlp.zero_grad()
                y = mlp(leaf)
                y.sum().backward()
                own = [mlp.fc1.norm.weight.grad, mlp.fc1.weight.grad, mlp.fc1.bias.grad]
                results.append([y, leaf.grad, *own, mlp.fc2.weight.grad / scale.to(dtype)])
            for other in results[1:]:
                assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), (activation, dtype)
            assert scale[5] < (2.0**-2 if activation == "clamped_swiglu" else 2.0**-5)
            assert torch.equal(scale.log2(), scale.log2().round())


def test_it_cures_the_outlier_that_breaks_plain_fp8() -> None:
    """Error of the output against fp64 of the same weights on tokens without the outlier, with one scale a tensor."""
    x = sample().bfloat16()
    exact = with_an_outlier("bf16")
    truth = copy.deepcopy(exact).double()(x.double())[1:]
    for name in ("tensorwise", "delayed"):
        mlp = with_an_outlier(name)
        errors = []
        for smooth in (False, True):
            if smooth:
                smooth_swiglu(mlp, x)
            with torch.no_grad():
                errors.append(float((mlp(x)[1:].double() - truth).norm() / truth.norm()))
        assert errors[0] > 0.2
        assert errors[1] < 0.08


def test_powers_of_two_travel_with_the_model() -> None:
    """State dicts into a fresh model; silent channels and weights that would underflow stay; bad input is named."""
    mlp = NormMLP(H, F, activation="swiglu", recipe="delayed", bias=False)
    with pytest.raises(ValueError, match="got no batch"):
        smooth_swiglu(mlp, [])
    mlp(sample()).sum().backward()
    ottava.ScalingState(mlp).update()
    assert mlp.fc2.quantizers.input.amax_history.any()
    with torch.no_grad():
        mlp.fc1.weight[F + 1] = 0.0
        mlp.fc1.weight[F + 2] *= 2.0**-20
        mlp.fc2.weight[0, 2] = 1e-42
    scale = smooth_swiglu(mlp, [sample(), sample(3)])
    assert scale[1] == scale[2] == 1.0
    assert (scale != 1.0).any()
    assert not mlp.fc2.quantizers.input.amax_history.any()
    fresh = NormMLP(H, F, activation="swiglu", recipe="delayed", bias=False)
    fresh.load_state_dict(mlp.state_dict())
    x = sample()
    with torch.no_grad(), ottava.autocast(enabled=False):
        assert torch.equal(fresh(x), mlp(x))


def test_folded_powers_leave_no_bit_and_the_same_rows_to_cast() -> None:
    """fc1 holds the powers, with biases; an activation that cannot is refused by name, and nothing is changed."""
    for name in ("swiglu", "geglu", "reglu", "glu", "qgeglu"):
        for dtype in (torch.float32, torch.bfloat16):
            mlp = with_an_outlier("bf16", dtype, activation=name, bias=True)
            x = sample().to(dtype)
            powers = smooth_swiglu(mlp, x)
            assert (powers != 1).any()
            with torch.no_grad():
                expected, up = mlp(x), mlp.fc1.weight[F:].clone()
                with pytest.raises(ValueError, match="has factors of smooth_swiglu"):
                    of_model(mlp, {})
                assert fold_smooth_swiglu(mlp) == [""]
                assert mlp.fc2.smooth is None
                assert torch.equal(mlp(x), expected), (name, dtype)
            assert torch.equal(mlp.fc1.weight[F:], up * powers[:, None].to(dtype))
            made = torch.randn(5, 2 * F).to(dtype)  # by fc1
            rows, _ = mlp.activation.forward(torch.cat((made[:, :F], made[:, F:] * powers.to(dtype)), 1))
            assert torch.equal(rows, mlp.activation.forward(made, powers)[0]), name
            assert any(weight.name == "fc1.weight" for weight in of_model(mlp, {}).weights)
    for name in ("gelu", "clamped_swiglu"):
        mlp = NormMLP(H, F, activation=name, recipe="bf16")
        smooth_swiglu(mlp, sample())
        before = mlp.fc1.weight.clone()
        with pytest.raises(ValueError, match=f"the result of {name} is no product with an up row"):
            fold_smooth_swiglu(mlp)
        assert torch.equal(mlp.fc1.weight, before)
        assert mlp.fc2.smooth is not None
