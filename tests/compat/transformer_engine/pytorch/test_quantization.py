"""TransformerEngine's contexts: which recipe a module runs, calibration, and what the global state answers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ottava
import ottava.compat.transformer_engine.pytorch as te
from ottava.compat.transformer_engine.common import recipe as recipes
from ottava.compat.transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling
from ottava.compat.transformer_engine.pytorch.fp8 import FP8GlobalStateManager, get_default_fp8_recipe
from ottava.compat.transformer_engine.pytorch.optimizers import FusedAdam
from ottava.weights.parameter import is_quantized_weight


def run(layer: nn.Module, x: Tensor) -> str:
    layer(x).sum().backward()
    return layer.last_call.recipe.name  # type: ignore[no-any-return,union-attr]


def test_the_innermost_context_decides() -> None:
    """By the new and the old names; without one, and with enabled=False, a module has the bits of torch's own."""
    layer, x = te.Linear(32, 16).bfloat16(), torch.randn(4, 32).bfloat16()
    assert run(layer, x) == "bf16"
    with te.autocast(recipe=MXFP8BlockScaling()):
        assert run(layer, x) == "mxfp8"
        with te.fp8_autocast(fp8_recipe=Float8CurrentScaling()):
            assert run(layer, x) == "tensorwise"
            with te.fp8_autocast(enabled=False):
                assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert te.get_default_recipe() == get_default_fp8_recipe() == DelayedScaling()
    with te.autocast():
        assert run(layer, x) == "DelayedScaling"
    assert te.autocast(recipe=MXFP8BlockScaling())(run)(layer, x) == "mxfp8"


def test_delayed_scales_are_those_of_a_converted_model() -> None:
    """Six steps of one forward, backward and step: outputs, gradients and histories bit for bit."""
    torch.manual_seed(1)
    theirs = nn.Sequential(te.Linear(32, 48), nn.ReLU(), te.Linear(48, 16)).bfloat16()
    ours = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16)).bfloat16()
    ours.load_state_dict({k: v for k, v in theirs.state_dict().items() if "_extra_state" not in k})
    recipe = DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent")
    ottava.convert(ours, recipe.ottava, filter=lambda *_: True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (theirs, ours)]
    for step in range(6):
        x = (torch.randn(8, 32) * 2.0 ** (step % 3)).bfloat16()
        outputs = []
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            with te.fp8_autocast(enabled=model is theirs, fp8_recipe=recipe) if model is theirs else ottava.autocast():
                y = model(x)
            optimizer.zero_grad()
            y.square().sum().backward()
            optimizer.step()
            outputs.append((y, *(p.grad for p in model.parameters())))
        assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    for one, other in ((theirs[0], ours[0]), (theirs[2], ours[2])):
        for a, b in zip(one.quantizers.doors, other.quantizers.doors, strict=True):
            assert torch.equal(a.amax_history, b.amax_history)
            assert torch.equal(a.scale, b.scale)


def test_calibration_fills_histories_in_high_precision() -> None:
    """Where TransformerEngine's Linear notes nothing; the next FP8 step then uses these scales."""
    layer, x = te.Linear(32, 16).bfloat16(), torch.randn(4, 32).bfloat16()
    plain = nn.functional.linear(x, layer.weight, layer.bias)
    with te.fp8_autocast(enabled=False, calibrating=True, fp8_recipe=DelayedScaling()):
        y = layer(x)
        y.sum().backward()
    assert torch.equal(y, plain)
    assert float(layer.quantizers.input.amax_history[0]) == float(x.abs().max())
    assert float(layer.quantizers.weight.scale) == pytest.approx(448 / float(layer.weight.abs().max()))
    assert float(layer.quantizers.grad_output.amax_history[0]) == 1.0


def test_global_state_answers_and_holds_nothing() -> None:
    manager = FP8GlobalStateManager
    with pytest.warns(UserWarning, match="does nothing in ottava"):
        manager.reset()
    assert (manager.is_fp8_enabled(), manager.is_fp8_calibration()) == (False, False)
    layer, x = te.Linear(8, 8), torch.ones(2, 8)
    with te.autocast(recipe=Float8CurrentScaling()):
        assert manager.is_fp8_enabled()
        layer(x)
    with te.autocast(enabled=False, calibrating=True):
        assert (manager.is_fp8_enabled(), manager.is_fp8_calibration()) == (False, True)
        layer(x)
    assert manager.is_fp8_available() == te.is_mxfp8_available(return_reason=True) == (True, "")
    assert te.is_fp8_available() is True
    scale = torch.tensor([3.0, 3.0, 3.0])  # of the step before, where there is no amax
    assert te._default_sf_compute(torch.tensor([2.0, 0.0, torch.inf]), scale, 448.0, 1).tolist() == [112.0, 3.0, 3.0]


def test_weights_of_a_quantized_model_are_codes() -> None:
    """By both names, for modules of both packages; they train under an optimizer with masters."""
    custom = recipes.CustomRecipe(qfactory=lambda role: te.MXFP8Quantizer(te.DType.kFloat8E4M3))
    with te.quantized_model_init(recipe=custom):
        layer = te.Linear(64, 64, device="cpu")
    assert str(layer.weight.spec) == "E4M3[1x32, e8m0]"
    for init in (te.quantized_model_init, te.fp8_model_init):
        with init(enabled=False):
            assert not is_quantized_weight(te.Linear(64, 64, device="cpu").weight)
        torch.manual_seed(0)
        with init(recipe=Float8CurrentScaling(), preserve_high_precision_init_val=True):
            model = torch.nn.Sequential(te.LayerNormLinear(64, 64, device="cpu"), te.Linear(64, 64, device="cpu"))
            model.append(torch.nn.Linear(64, 64))
        weights = [layer.weight for layer in model]
        assert all(is_quantized_weight(weight) for weight in weights)
        assert all(weight.high_precision is not None for weight in weights)
        optimizer = FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
        x, losses = torch.randn(16, 64), []
        for _ in range(4):
            optimizer.zero_grad()
            with te.autocast(recipe=Float8CurrentScaling()):
                losses.append(model(x).square().mean())
            losses[-1].backward()
            optimizer.step()
        assert losses[-1] < losses[0]
