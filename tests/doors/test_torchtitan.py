"""torchtitan's own override mechanism on its Llama 3: which linears change, and what they compute."""

from __future__ import annotations

import copy
import importlib
import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava

pytest.importorskip("torchtitan")
pytest.importorskip("spmd_types", reason="torchtitan without its dependencies")
doors = pytest.importorskip("ottava.doors.torchtitan")
pytest.importorskip("torchtitan.models.llama3")

from torchtitan.config import Configurable  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.common.linear import Linear, ScaledBiasRowwiseLinear  # noqa: E402
from torchtitan.models.llama3 import llama3_configs  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402

overrides: Any = importlib.import_module("torchtitan.config.override")  # its package has a function of that name
DOOR = "ottava.doors.torchtitan"


class OnCPU(FlexAttention):
    """FlexAttention has no backward on a CPU: torch's causal attention in its place."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2)


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    """An override that stands in for another vendor's, registered as torchtitan registers any."""
    before = dict(overrides._REGISTRY)

    @overrides.override(target=FlexAttention.Config)
    def attention_on_cpu(cfg: Any) -> Any:
        return overrides.derive(cfg, OnCPU.Config)

    yield
    overrides._REGISTRY.clear()
    overrides._REGISTRY.update(before)


@dataclass(kw_only=True, slots=True)
class Root(Configurable.Config):  # what a Trainer.Config holds of the model
    model_spec: ModelSpec


def small() -> Any:
    config = llama3_configs["debugmodel"](attn_backend="flex")
    del config.layers[2:]
    return config


def applied(config: Any, *imports: str) -> list[str]:
    """What `--override.imports` does."""
    spec = ModelSpec("llama3", "debugmodel", config, *[None] * 4)  # type: ignore[arg-type]
    asked = overrides.OverrideConfig(imports=overrides.parse_cli_imports(list(imports)))
    return overrides.apply_overrides(asked, Root(model_spec=spec))


def build(config: Any) -> Any:
    """As the Trainer does: on meta, checked, with memory, with initial values."""
    with torch.device("meta"):
        model = config.build()
    model.verify_module_protocol()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def train(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tokens = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(-1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def by_hand(model: nn.Module, recipe: str, names: set[str]) -> nn.Module:
    """A model of torchtitan's own linears; those with these names hand their rows to an `ottava.nn.Linear`."""
    for name in names:
        theirs = model.get_submodule(name)
        ours = ottava.nn.Linear(theirs.in_features, theirs.out_features, bias=False, recipe=recipe)
        ours.weight = theirs.weight
        vars(theirs)["forward"] = ours.forward
        vars(theirs)["kept"] = ours
    return model


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_a_model_trains_with_the_bits_of_linears_called_by_hand(recipe: str) -> None:
    config = small()
    applied(config, "test_torchtitan.attention_on_cpu")
    plain = build(copy.deepcopy(config))
    log = applied(config, f'{DOOR}.model={{"recipe": "{recipe}", "skip": ["layers.0.*"]}}')
    assert len(log) == 1
    model = build(config)
    changed = {name for name, module in model.named_modules() if isinstance(module, doors.OttavaLinear)}
    linears = {name for name, module in plain.named_modules() if isinstance(module, Linear)}
    assert changed == {name for name in linears if name.startswith("layers.1.")}
    assert {name: module.name for name, module in model.named_modules() if name in changed} == {n: n for n in changed}
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in plain.named_parameters())  # same initial values
    losses = train(model)
    assert {row.layer for row in ottava.receipt(model).rows if row.fp8} == changed
    assert losses == train(by_hand(copy.deepcopy(plain), recipe, changed))
    assert losses != train(copy.deepcopy(plain))
    if recipe == "tensorwise":  # a stateless recipe adds no key to torchtitan's checkpoints
        assert model.state_dict().keys() == plain.state_dict().keys()


def test_linears_go_beside_other_overrides() -> None:
    """`linear` leaves the other vendor's attention alone; `model` claims the whole tree, and torchtitan says so."""
    other = "test_torchtitan.attention_on_cpu"
    config = small()
    log = applied(config, f'{DOOR}.linear={{"recipe": "mxfp8"}}', other)
    assert len([line for line in log if "OttavaLinear.Config" in line]) == 10
    assert len([line for line in log if "OnCPU.Config" in line]) == 2
    model = build(config)
    losses = train(model)
    assert losses[-1] < losses[0]
    assert type(model.lm_head) is Linear
    assert model.layers["1"].feed_forward.w1.last_call.recipe.name == "mxfp8"
    with pytest.raises(ValueError, match=r"torchtitan\.model' claims 'model_spec\.model', an ancestor"):
        applied(small(), f"{DOOR}.model", other)


def test_what_cannot_be_done_is_said() -> None:
    with pytest.raises(ValueError, match=r"skip: unknown pattern 'blocks\.\*'"):
        applied(small(), f'{DOOR}.model={{"skip": ["blocks.*"]}}')
    with pytest.raises(ValueError, match="unknown recipe 'mxfp9'; did you mean 'mxfp8'"):
        applied(small(), f'{DOOR}.linear={{"recipe": "mxfp9"}}')
    with pytest.raises(ValueError, match="none of 11 linears can run under 'tensorwise'"):
        applied(small(), f'{DOOR}.model={{"skip": ["*"]}}')
    config = small()
    first = config.layers[0].feed_forward
    first.w1 = overrides.derive(first.w1, ScaledBiasRowwiseLinear.Config)
    own = ottava.get_recipe("rowwise").to_dict()
    assert doors.model(config, recipe=own) is config
    assert type(first.w1) is ScaledBiasRowwiseLinear.Config  # it has a forward of its own
    assert build(config).layers["0"].feed_forward.w2.recipe == ottava.get_recipe("rowwise")


def test_the_example_shows_what_an_override_does(capsys: pytest.CaptureFixture[str]) -> None:
    ours = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "door_torchtitan.py"))["main"](
        "rowwise"
    )
    assert len(ours) == 25
    assert "100.0% of the linear work in FP8" in capsys.readouterr().out
