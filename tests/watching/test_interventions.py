"""A watch that changes casts: the named GEMMs run as asked, the others keep their bits, and the end restores all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ottava
from ottava.base.settings import ConfigError
from ottava.recipe import RECIPES, get_recipe
from ottava.watching.config import Intervention
from ottava.watching.doors import changed
from scaling_samples import two_linears as model


def gradients(layers: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    layers.zero_grad()
    layers(x).float().square().mean().backward()
    return [p.grad.clone() for p in layers.parameters() if p.grad is not None]


@pytest.mark.parametrize("action", ["high_precision", "fake", "current"])
def test_casts_run_as_asked_and_come_back(action: str, tmp_path: Path) -> None:
    """The witness is the same model under a recipe with the change written by hand."""
    recipe = get_recipe("delayed")
    before, layers = gradients(model("delayed")), model("delayed")
    change = Intervention(layers=["0"], gemms=["fprop", "wgrad"], action=action)  # type: ignore[arg-type]
    by_hand = recipe.override("0", fprop=changed(recipe, change).fprop, wgrad=changed(recipe, change).wgrad)
    wanted_model = model("bf16")
    ottava.convert(wanted_model, by_hand)
    with ottava.watch(layers, tmp_path / "run", {"interventions": [change.model_dump()], "every": 1}):
        while_watched = gradients(layers)
        assert all(map(torch.equal, while_watched, gradients(wanted_model)))
        assert layers[0].resolved.name == f"delayed+{action}"
        assert layers[2].resolved == recipe
    assert layers[0].resolved == recipe
    # after one step of delayed scaling a history exists, so the bits of the first step need a new model
    if action == "high_precision":
        assert not all(map(torch.equal, before, while_watched))
    events = ottava.debug.Run.open(tmp_path / "run").events
    assert any("changed the casts of 0" in event.get("text", "") for event in events)


def test_every_recipe_takes_every_action_or_a_sentence() -> None:
    for name, recipe in RECIPES.items():
        assert not changed(recipe, Intervention(action="high_precision")).fprop.quantized
        fake = changed(recipe, Intervention(action="fake", gemms=["fprop"]))
        assert (str(fake.fprop), fake.dgrad) == ("E4M3[tensor] x E4M3[tensor] in BF16", recipe.dgrad), name
        current = changed(recipe, Intervention(action="current"))
        assert not any(spec is not None and spec.predicted for spec in (current.fprop.lhs, current.wgrad.lhs)), name
    with pytest.raises(ValueError, match="quantize both or neither"):
        changed(get_recipe("tensorwise"), Intervention(action="fake", tensors=["X"], gemms=["fprop"]))


def test_what_cannot_be_changed_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Layers of other packages, and pairs that no GEMM takes."""
    plain = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with ottava.watch(plain, tmp_path / "plain", {"interventions": [{"action": "fake"}], "every": 1}):
        gradients(plain)
        optimizer.step()
    assert "cannot change the casts of 0: they are no layers of ottava" in caplog.text
    layers = model("tensorwise")
    with pytest.raises(ConfigError, match="'nope' matches no layer"):
        ottava.watch(layers, tmp_path / "typo", {"interventions": [{"layers": "nope", "action": "fake"}]})
    one_sided = {"action": "fake", "tensors": ["X"], "gemms": ["fprop"]}
    with ottava.watch(layers, tmp_path / "one", {"interventions": [one_sided]}):
        pass
    assert "quantize both or neither" in caplog.text
    assert layers[0].resolved == get_recipe("tensorwise")
