"""NormMLP against plain torch, Hugging Face's blocks with their weights, and itself without fusion; Smooth-SwiGLU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.bench.cpu import saved_bytes
from ottava.engine.functional import produced
from ottava.nn import ACTIVATIONS, ActivatedLinear, Linear, NormMLP
from ottava.nn.mlp import fold_smooth_swiglu, smooth_swiglu
from ottava.recipe import Recipe
from ottava.serving.trained import of_model


class Unfused(nn.Module):
    """The same numbers in four layers, rows between them as tensors."""

    def __init__(self, mlp: NormMLP) -> None:
        super().__init__()
        self.norm, self.formula = copy.deepcopy(mlp.fc1.norm), mlp.activation
        recipe = mlp.fc1.recipe
        for name, layer in (("fc1", mlp.fc1), ("fc2", mlp.fc2)):
            own = Linear(
                layer.in_features, layer.out_features, layer.bias is not None, recipe=recipe, dtype=layer.weight.dtype
            )
            own.load_state_dict(layer.state_dict(), strict=False)
            setattr(self, name, own)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(produced(self.formula, self.fc1(self.norm(x))))  # type: ignore[operator,no-any-return]


def trained(model: nn.Module, x: Tensor, run: Any = None) -> list[Tensor]:
    """Output, dx, and the gradients of norm, fc1 and fc2."""
    leaf = x.detach().clone().requires_grad_()
    model.zero_grad()
    torch.manual_seed(3)
    y = (model if run is None else run)(leaf)
    y.float().square().sum().backward()
    names = ("fc1.norm.weight", "norm.weight", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
    own = dict(model.named_parameters())
    return [y.detach(), leaf.grad, *(own[name].grad.clone() for name in names if name in own)]


def test_fused_and_unfused_are_the_same_bits(recipe: Recipe) -> None:
    """A gated and a plain activation, with and without bias; recomputed as well; kept in FP8 all but gradients."""
    for activation, bias in (("swiglu", False), ("gelu", True)):
        x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
        results = {}
        for save in ("bf16", "recompute", "fp8"):
            torch.manual_seed(0)
            mlp = NormMLP(
                *(64, 96),
                activation=activation,
                norm="rmsnorm",
                bias=bias,
                save=save,  # type: ignore[arg-type]
                recipe=recipe,
                dtype=torch.bfloat16,
            )
            results[save] = trained(mlp, x)
        want = trained(Unfused(mlp), x)
        for save in ("bf16", "recompute"):
            assert [i for i, (a, b) in enumerate(zip(results[save], want, strict=True)) if not torch.equal(a, b)] == []
        assert torch.equal(results["fp8"][0], want[0])
        dx, exact = results["fp8"][1].double(), want[1].double()
        assert float((dx - exact).norm() / exact.norm()) < 0.15  # E4M3 rounds by up to 2**-4


def test_in_high_precision_it_is_plain_torch() -> None:
    """Bit for bit forward and backward for activations of torch's own; every name of the table runs and trains.

    A squared ReLU's second GEMM adds its bias last, torch 2.11 first: in BF16 a rounding may fall the other way.
    """
    for name, lines in {
        "gelu": F.gelu,
        "swiglu": lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
        "geglu": lambda h: F.gelu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
        "relu2": lambda h: F.relu(h).square(),
    }.items():
        for dtype in (torch.float32, torch.bfloat16):
            mlp = NormMLP(64, 96, activation=name, recipe="bf16", dtype=dtype)
            leaves = [
                torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_() for _ in "ab"
            ]
            plain = nn.LayerNorm(64, dtype=dtype)
            h = F.linear(plain(leaves[1]), mlp.fc1.weight, mlp.fc1.bias)
            want = F.linear(lines(h), mlp.fc2.weight, mlp.fc2.bias)
            got = mlp(leaves[0])
            slack = (2**-8 * want.abs() + 96 * 2**-24 * h.abs().max() ** 2).float()
            exact = not (name == "relu2" and dtype == torch.bfloat16)
            assert torch.equal(got, want) if exact else ((got - want).abs().float() <= slack).all(), name
            dy = torch.randn(3, 64).to(dtype)
            got.backward(dy)
            d_fc1 = mlp.fc1.weight.grad.clone()
            mlp.zero_grad()
            want.backward(dy)
            assert torch.equal(d_fc1, mlp.fc1.weight.grad), name
    for name, activation in ACTIVATIONS.items():
        mlp = NormMLP(32, 32, activation=name, norm=None, dtype=torch.bfloat16)
        assert mlp.fc1.weight.shape == (64 if activation.gated else 32, 32)
        mlp(torch.randn(5, 32).bfloat16()).sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in mlp.parameters())


def test_compiled_and_recomputed_from_outside() -> None:
    """One graph in every way to save; a checkpoint around a recomputing MLP; no_grad keeps nothing."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    for save in ("bf16", "fp8", "recompute"):
        torch.manual_seed(0)
        mlp = NormMLP(64, 96, activation="swiglu", norm="rmsnorm", save=save, dtype=torch.bfloat16)  # type: ignore[arg-type]
        want = trained(mlp, x)
        torch._dynamo.reset()
        runs = (
            torch.compile(mlp, fullgraph=True, backend="aot_eager"),
            lambda x, m=mlp: checkpoint(m, x, use_reentrant=False),
        )
        for run in runs:
            assert all(torch.equal(a, b) for a, b in zip(trained(mlp, x, run), want, strict=True))
        with torch.no_grad():
            assert torch.equal(mlp(x), want[0])


def test_what_each_way_keeps() -> None:
    """A token of H and F features: x, statistics, codes of x and of the activated rows, and what save says of 2 F."""
    tokens, h, f = 256, 128, 256
    found = {}
    for save in ("bf16", "fp8", "recompute"):
        mlp = NormMLP(h, f, activation="swiglu", norm="rmsnorm", bias=False, save=save, dtype=torch.bfloat16)  # type: ignore[arg-type]
        x = torch.randn(tokens, h).bfloat16().requires_grad_()
        found[save] = saved_bytes(lambda mlp=mlp, x=x: mlp(x), mlp)[0]  # type: ignore[misc]
    scales = 4 + 4  # one of each tensor
    norm = tokens * (2 * h + 4 + h)
    assert found["bf16"] == norm + tokens * (2 * 2 * f + f) + scales
    assert found["fp8"] == norm + tokens * (2 * f + 4 * 2 * f // 128 + f) + scales
    assert found["recompute"] == tokens * (2 * h + f) + 4


def test_receipts_and_names() -> None:
    """Two layers, 100 %, with their sizes; errors say what fits."""
    model = nn.Sequential(NormMLP(64, 96, activation="swiglu", dtype=torch.bfloat16))
    model(torch.randn(4, 64).bfloat16()).sum().backward()
    rows = ottava.receipt(model).rows
    assert [(row.layer, row.shape) for row in rows if row.gemm == "fprop"] == [
        ("0.fc1", "4 x 192 x 64"),
        ("0.fc2", "4 x 64 x 96"),
    ]
    ottava.assert_fp8(model, 1.0)
    assert ottava.convert(model, "mxfp8").converted == ("0.fc1", "0.fc2")
    for wrong in ({"save": "bf61"}, {"activation": "swigul"}, {"norm": "rms"}):
        with pytest.raises(ValueError, match=next(iter(wrong.values()))):
            NormMLP(64, 96, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs 'bf16' or 'fp8'"):
        ActivatedLinear(64, 96, save="recompute")  # type: ignore[arg-type]
    assert "activation=gelu" in repr(ActivatedLinear(64, 96))
    assert "recipe=tensorwise" in repr(NormMLP(64, 96, save="recompute").fc2)  # the MLP makes its rows


H, FFN = 64, 128


def with_an_outlier(recipe: str, dtype: torch.dtype = torch.bfloat16, **more: Any) -> NormMLP:
    """Gate and up rows of channel 5 align, and so does one token; the channel's column in fc2 is short."""
    torch.manual_seed(0)
    mlp = NormMLP(H, FFN, norm="rmsnorm", recipe=recipe, dtype=dtype, **({"activation": "swiglu"} | more))
    with torch.no_grad():
        mlp.fc1.weight[5] = mlp.fc1.weight[-FFN + 5] = 30 * direction()
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
                scale = smooth_swiglu(mlp, x.to(dtype)) if fold else torch.ones(FFN)
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
    mlp = NormMLP(H, FFN, activation="swiglu", recipe="delayed", bias=False)
    with pytest.raises(ValueError, match="got no batch"):
        smooth_swiglu(mlp, [])
    mlp(sample()).sum().backward()
    ottava.ScalingState(mlp).update()
    assert mlp.fc2.quantizers.input.amax_history.any()
    with torch.no_grad():
        mlp.fc1.weight[FFN + 1] = 0.0
        mlp.fc1.weight[FFN + 2] *= 2.0**-20
        mlp.fc2.weight[0, 2] = 1e-42
    scale = smooth_swiglu(mlp, [sample(), sample(3)])
    assert scale[1] == scale[2] == 1.0
    assert (scale != 1.0).any()
    assert not mlp.fc2.quantizers.input.amax_history.any()
    fresh = NormMLP(H, FFN, activation="swiglu", recipe="delayed", bias=False)
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
                expected, up = mlp(x), mlp.fc1.weight[FFN:].clone()
                with pytest.raises(ValueError, match="has factors of smooth_swiglu"):
                    of_model(mlp, {})
                assert fold_smooth_swiglu(mlp) == [""]
                assert mlp.fc2.smooth is None
                assert torch.equal(mlp(x), expected), (name, dtype)
            assert torch.equal(mlp.fc1.weight[FFN:], up * powers[:, None].to(dtype))
            made = torch.randn(5, 2 * FFN).to(dtype)  # by fc1
            rows, _ = mlp.activation.forward(torch.cat((made[:, :FFN], made[:, FFN:] * powers.to(dtype)), 1))
            assert torch.equal(rows, mlp.activation.forward(made, powers)[0]), name
            assert any(weight.name == "fc1.weight" for weight in of_model(mlp, {}).weights)
    for name in ("gelu", "clamped_swiglu"):
        mlp = NormMLP(H, FFN, activation=name, recipe="bf16")
        smooth_swiglu(mlp, sample())
        before = mlp.fc1.weight.clone()
        with pytest.raises(ValueError, match=f"the result of {name} is no product with an up row"):
            fold_smooth_swiglu(mlp)
        assert torch.equal(mlp.fc1.weight, before)
        assert mlp.fc2.smooth is not None
