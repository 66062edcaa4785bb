"""Faults put into one cast of one layer are found there, and nothing is changed on the way."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.experiments.bisect import Probe, bisect
from ottava.recipe import RECIPES, Recipe

LAYERS, WIDTH = 8, 64


class Blocks(nn.Module):
    """A residual stack, as networks are, so that an error neither dies nor explodes on its way."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(nn.functional.rms_norm(x, (WIDTH,))))
        return x


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Distance to some target."""
    x, target = batch
    return (model(x).float() - target).square().mean()


def case(recipe: Recipe | str, layers: int = LAYERS) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A converted stack and a batch."""
    torch.manual_seed(0)
    model = Blocks(layers)
    ottava.convert(model, recipe)
    return model, (torch.randn(32, WIDTH), torch.randn(32, WIDTH))


@pytest.mark.parametrize("layer", [0, 3, 7])
@pytest.mark.parametrize("tensor", ["input", "weight"])
def test_finds_a_stale_scale(layer: int, tensor: str) -> None:
    """Delayed scaling whose one door holds a scale 100 times too large: it clips."""
    model, batch = case("delayed")
    getattr(model.layers[layer].quantizers, tensor).scale.fill_(1e5)
    result = bisect(model, batch, loss)
    assert result.suspect is not None
    assert (result.suspect.layer, result.suspect.tensor) == (f"layers.{layer}", tensor)
    assert result.suspect.cause == "quantization"
    assert result.suspect.evidence["overflow_pct"] > 50
    assert not result.spread
    assert result.recipe == "delayed"


def test_finds_a_gradient_that_underflows() -> None:
    """A scale from before the gradients shrank: dY is flushed, in one layer. Its dW and all earlier ones are lost."""
    model, batch = case("delayed")
    model.layers[5].quantizers.grad_output.scale.fill_(1e-3)
    result = bisect(model, batch, loss)
    assert result.suspect is not None
    assert (result.suspect.layer, result.suspect.tensor) == ("layers.5", "grad_output")
    assert result.suspect.gemm in ("dgrad", "wgrad")
    assert result.suspect.evidence["underflow_pct"] > 90
    assert result.total.error > 0.3


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_finds_the_gemm_of_a_coarser_recipe(gemm: str) -> None:
    """Four bits in one GEMM of one layer, eight in all others."""
    recipe = RECIPES["blockwise"].override("layers.4", **{gemm: getattr(RECIPES["nvfp4"], gemm)})
    result = bisect(*case(recipe), loss)
    assert result.suspect is not None
    assert (result.suspect.layer, result.suspect.gemm) == ("layers.4", gemm)
    assert not result.spread


def test_says_that_an_error_is_spread() -> None:
    """All layers alike: the worst one is named, and not blamed."""
    result = bisect(*case("tensorwise"), loss)
    assert result.spread
    assert result.suspect is not None
    assert result.suspect.share_of_gemm < 0.5
    assert result.verdict.startswith("the error is spread over many layers")


def test_recipe_asked_about_need_not_be_the_models() -> None:
    model, batch = case("bf16")
    recipe = RECIPES["tensorwise"].override("*", "bf16").override("layers.2", "tensorwise")
    result = bisect(model, batch, loss, recipe)
    assert result.suspect is not None
    assert result.suspect.layer == "layers.2"
    assert result.suspect.share == pytest.approx(result.suspect.share_of_gemm, abs=1.0)
    assert result.recipe == "tensorwise"


def test_steps_are_few() -> None:
    """3 GEMMs, two probes a halving, two operands, one cause."""
    for layers in (2, 16):
        model, batch = case("delayed", layers)
        model.layers[1].quantizers.weight.scale.fill_(1e6)
        told: list[Probe] = []
        result = bisect(model, batch, loss, on_probe=told.append)
        assert len(result.probes) == 3 + 2 * int(math.log2(layers)) + 2 + 1
        assert tuple(told) == result.probes


def test_nothing_is_changed_and_twice_is_the_same() -> None:
    model, batch = case("delayed")
    optimizer = torch.optim.AdamW(model.parameters())
    loss(model, batch).backward()
    optimizer.step()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    moments = copy.deepcopy(optimizer.state_dict())
    gradients = [p.grad.clone() for p in model.parameters()]
    first = bisect(model, batch, loss)
    assert bisect(model, batch, loss).to_dict() == first.to_dict()
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert str(optimizer.state_dict()) == str(moments)
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(door._forward_hooks for layer in model.layers for door in layer.quantizers.doors)


def test_loss_as_target() -> None:
    """Forward only: a recipe that leaves fprop alone has nothing to find."""
    model, batch = case("delayed")
    model.layers[6].quantizers.input.scale.fill_(1e5)
    result = bisect(model, batch, loss, target="loss")
    assert result.suspect is not None
    assert (result.suspect.layer, result.suspect.gemm, result.suspect.tensor) == ("layers.6", "fprop", "input")
    assert [probe.gemm for probe in result.gemms] == ["fprop"]
    backward_only = replace(RECIPES["tensorwise"].override("*", fprop=None), name="backward")
    assert bisect(*case(backward_only), loss, target="loss").suspect is None


def test_finds_bad_accumulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that keeps few bits of its sums, in one layer: the operands are innocent. There is no such kernel for a
    CPU, so this one is made of the reference and a rounding of its result."""
    from ottava.kernels import reference
    from ottava.ops import dispatch

    monkeypatch.setattr(dispatch, "CPU_KERNELS", (reference,))
    model, batch = case("blockwise")
    really = reference.gemm

    def short(a: Any, b: Any, out_dtype: torch.dtype, bias: Any, fast_accum: bool) -> Tensor:
        y = really(a, b, out_dtype, bias, fast_accum)
        return ottava.quantize(y, ottava.QuantizationSpec(ottava.E2M1)).dequantize() if fast_accum else y

    monkeypatch.setattr(reference, "gemm", short)
    recipe = RECIPES["blockwise"]
    slow = replace(recipe, fprop=replace(recipe.fprop, fast_accum=False))
    result = bisect(model, batch, loss, slow.override("layers.3", fprop=recipe.fprop))
    assert result.suspect is not None
    assert (result.suspect.layer, result.suspect.gemm, result.suspect.cause) == ("layers.3", "fprop", "accumulation")
    (fprop,) = [probe for probe in result.gemms if probe.gemm == "fprop"]
    assert fprop.accumulation_share > 0.8


def test_nothing_to_find() -> None:
    """Inputs and weights that FP8 holds exactly."""
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    ottava.convert(model, "tensorwise")
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(32))
    result = bisect(model, torch.ones(2, 32), lambda net, x: net(x).sum())
    assert result.suspect is None
    assert "nothing to find" in result.verdict
    with pytest.raises(ValueError, match="no GEMM of any layer"):
        bisect(model, torch.ones(2, 32), lambda net, x: net(x).sum(), "bf16")
    with pytest.raises(ValueError, match="gradient"):
        bisect(model, torch.ones(2, 32), lambda net, x: net(x).sum(), target="gradent")  # type: ignore[arg-type]


def test_names_with_pattern_characters_are_only_names() -> None:
    """A layer called "a*" is not every layer that begins with a."""
    model = nn.ModuleDict({"a*": nn.Linear(64, 64), "a[0]": nn.Linear(64, 64), "ab": nn.Linear(64, 64)})
    ottava.convert(model, "delayed")
    model["a[0]"].quantizers.input.scale.fill_(1e6)
    x = torch.randn(8, 64)
    result = bisect(model, x, lambda net, b: sum(net[n](b).square().mean() for n in net))
    assert result.suspect is not None
    assert result.suspect.layer == "a[0]"


def test_result_prints_and_is_json() -> None:
    model, batch = case("delayed")
    model.layers[3].quantizers.input.scale.fill_(1e5)
    result = bisect(model, batch, loss)
    values = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert values["suspect"]["layer"] == "layers.3"
    assert len(values["probes"]) == len(result.probes)
    text = str(result)
    assert text.startswith(result.verdict)
    assert "fp32 sums" in text
    assert all(probe.what in text for probe in result.probes)


def test_tells_an_accumulator_from_quantization_on_a_cpu() -> None:
    """Numbers that E4M3 holds exactly, over a long K: all error is the accumulator's, and promotions are the remedy.
    Of Gaussian numbers the cast loses more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4096, 32, bias=False))
    x = 2.0 ** torch.randint(-3, 1, (32, 4096)).float()
    model[0].weight.data = 2.0 ** torch.randint(-3, 1, (32, 4096)).float()
    ottava.convert(model, "tensorwise_e4m3")

    def mean(net: nn.Module, batch: Any) -> Tensor:
        return net(batch).float().mean()

    assert bisect(model, x, mean, target="loss").suspect is None  # with fp32 sums there is nothing to find
    result = bisect(model, x, mean, target="loss", accumulator="hopper")
    assert result.suspect is not None
    assert (result.suspect.cause, result.recipe) == ("accumulation", "tensorwise_e4m3 under hopper")
    assert "Remedy: slow accumulation" in result.notes[-1]
    assert result.gemms[0].promoted_db > result.gemms[0].native_db + 10
    promoted = bisect(model, x, mean, target="loss", recipe="tensorwise_e4m3/hopper_promoted")
    assert promoted.total.error < result.total.error / 4
    model[0].weight.data = torch.randn(32, 4096)
    result = bisect(model, torch.randn(32, 4096), mean, target="loss", accumulator="hopper")
    assert result.suspect is not None
    assert result.suspect.cause == "quantization"
    assert "the accumulator is not the cause" in result.notes[-1]
