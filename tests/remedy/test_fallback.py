"""Fallback: proposals with evidence, hysteresis, verification, the way back, and nothing changed unless asked."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.measure.observer import observe
from ottava.measure.tally import Detail
from ottava.measure.walk import measure, measure_packed
from ottava.recipe import RECIPES
from ottava.record.reader import Run, Table
from ottava.record.schema import SlotKey
from ottava.record.writer import RunWriter
from ottava.remedy.fallback import Fallback, Proposal, Verdict, by_fork, by_gradient
from ottava.remedy.guard import Spike

WIDTH = 256


class Net(nn.Module):
    """Two layers; the second one's input has tokens that its loss does not look at, as attention sinks are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.massive = 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        tokens = torch.ones(len(x), 1)
        tokens[:2] = self.massive
        y: Tensor = self.down(h * tokens)
        return y[2:]


def loss(model: nn.Module, x: Tensor) -> Tensor:
    """Mean square of what is not massive."""
    return (model(x) - x[2:]).square().mean()


def network(recipe: str = "tensorwise", massive: float = 1e5) -> Net:
    torch.manual_seed(0)
    model = Net()
    ottava.convert(model, recipe)
    model.massive = massive
    return model


class Looks:
    """Real looks at a model, as the watch gives them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def at(self, model: nn.Module) -> Table:
        self.count += 1
        with observe(model) as seen:
            loss(model, torch.randn(64, WIDTH)).backward()
        model.zero_grad()
        folder = self.folder / str(self.count)
        with RunWriter(folder) as writer:
            for (layer, tensor, direction, spec), tally in seen.tallies.items():
                own = getattr(model, layer).resolved.name
                cast = (spec.format.name, str(spec.granularity), spec.scale_format, spec.scaling)
                writer.tally(self.count, SlotKey(layer, tensor, direction, own, *cast, "door"), tally)
        return Run.open(folder).table()


@pytest.fixture
def looks(tmp_path: Path) -> Looks:
    return Looks(tmp_path)


def feed(fallback: Fallback, looks: Looks, model: nn.Module, count: int) -> list[list[str]]:
    """What each of some looks brings."""
    return [[f"{p.layer} -> {p.to}" for p in fallback.on_look(looks.count, looks.at(model))] for _ in range(count)]


def test_proposes_after_patience_and_changes_nothing(looks: Looks) -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    fallback = Fallback(model, patience=3)
    assert feed(fallback, looks, model, 5) == [[], [], ["down -> fprop rowwise, wgrad bf16"], [], []]  # said once
    (proposal,) = fallback.proposals
    assert proposal.gemms == ("fprop", "wgrad")
    assert {one.tensor for one in proposal.evidence} == {"input"}
    assert proposal.evidence[0].metric == "underflow_pct"
    assert proposal.predicted
    assert all(p.clears for p in proposal.predicted)
    assert not proposal.applied
    assert proposal.patch == (
        'recipe.override("down", fprop=get_recipe("rowwise").fprop, wgrad=get_recipe("bf16").wgrad)'
    )
    assert str(model.down.resolved.fprop.lhs) == "E4M3[tensor]"
    assert fallback.applied == {}
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    json.dumps(proposal.to_dict(), allow_nan=False)
    assert "down tensorwise -> fprop rowwise, wgrad bf16 (proposed): X underflow_pct" in str(proposal)


def test_applied_it_cures(looks: Looks) -> None:
    """The layer's next looks are well, dgrad is left alone, and only recipes have changed."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    before = copy.deepcopy(model.state_dict())
    fallback = Fallback(model, mode="apply", patience=2, recovery=1000)
    assert feed(fallback, looks, model, 4) == [[], ["down -> fprop rowwise, wgrad bf16"], [], []]
    assert str(model.down.resolved.fprop.lhs) == "E4M3[row, pow2]"
    assert model.down.resolved.dgrad == RECIPES["tensorwise"].dgrad
    assert model.up.resolved == RECIPES["tensorwise"]
    assert list(fallback.applied) == ["down"]
    rows = looks.at(model).where(layer="down", tensor="input")
    assert max(rows.metric("underflow_pct")) < 1
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert optimizer.state == {}


def test_one_bad_look_is_not_enough(looks: Looks) -> None:
    model = network(massive=1.0)
    fallback = Fallback(model, mode="apply", patience=2)
    for massive in (1e5, 1.0, 1e5, 1.0):
        model.massive = massive
        assert feed(fallback, looks, model, 1) == [[]]


def test_bf16_is_the_last_resort(looks: Looks) -> None:
    """Where no candidate is predicted to clear, or none is offered."""
    model = network()
    fallback = Fallback(model, mode="apply", patience=1, candidates=["tensorwise_e4m3"])
    assert feed(fallback, looks, model, 1) == [["down -> bf16"]]
    assert not model.down.resolved.fprop.quantized
    assert not model.down.resolved.wgrad.quantized
    assert model.down.resolved.dgrad.quantized


@pytest.mark.parametrize("detail", ["numbers", "exponents"])
def test_what_was_not_recorded_clears_nothing(looks: Looks, monkeypatch: pytest.MonkeyPatch, detail: Detail) -> None:
    """Without histograms no finer cast is predicted to be well, so none is proposed; the proposal says why."""
    monkeypatch.setattr(
        "ottava.measure.observer.measure_packed", lambda x, x_q, **_: measure_packed(x, x_q, detail=detail)
    )
    model = network()
    fallback = Fallback(model, patience=1)
    assert feed(fallback, looks, model, 1) == [["down -> bf16"]]
    (proposal,) = fallback.proposals
    assert ("no histograms to predict finer casts: watch with detail" in proposal.why) == (detail == "numbers")


def test_way_back_and_cooldown(looks: Looks) -> None:
    """When tokens are ordinary again for `recovery` looks, the layer gets its own back; then it is left alone."""
    model = network()
    own = model.down.recipe
    fallback = Fallback(model, mode="apply", patience=1, recovery=3, cooldown=2)
    assert feed(fallback, looks, model, 2) == [["down -> fprop rowwise, wgrad bf16"], []]
    model.massive = 1.0
    assert feed(fallback, looks, model, 4) == [[], [], [], ["down -> tensorwise"]]
    assert model.down.recipe == own
    assert fallback.applied == {}
    assert fallback.proposals[-1].evidence == ()
    model.massive = 1e5
    assert feed(fallback, looks, model, 3) == [[], [], ["down -> fprop rowwise, wgrad bf16"]]


def test_revert(looks: Looks) -> None:
    """By name or all; a delayed layer has its doors again."""
    model = network("delayed")
    state = {name: str(door.spec) for name, door in model.down.quantizers.named_children()}
    fallback = Fallback(model, mode="apply", patience=1)
    feed(fallback, looks, model, 1)
    assert model.down.quantizers.input.spec is None
    assert fallback.revert("up") == []
    assert fallback.revert() == ["down"]
    assert {name: str(door.spec) for name, door in model.down.quantizers.named_children()} == state
    assert fallback.revert() == []
    with pytest.raises(ValueError, match="down"):
        fallback.revert("dwn")


def test_finer_than_it_has(looks: Looks) -> None:
    """A layer that has rows already is not offered them again."""
    model = network("rowwise", massive=1.0)
    fallback = Fallback(model, patience=1)
    x = torch.randn(128, WIDTH).mul(3).exp()  # not even a row is well under one scale
    key = SlotKey("up", "input", "row", "rowwise", "E4M3", "row", "pow2", "current", "door")
    with RunWriter(looks.folder / "own") as writer:
        writer.tally(1, key, measure(x, ottava.quantize(x, RECIPES["rowwise"].fprop.lhs)))
    (proposal,) = fallback.on_look(1, Run.open(looks.folder / "own").table())
    assert set(proposal.changes.values()) <= {"blockwise", "mxfp8", "bf16"}


def test_at_most_some_layers_at_once_worst_first(looks: Looks) -> None:
    model = network()
    model.eval()
    fallback = Fallback(model, patience=1, most=1)
    folder = looks.folder / "two"
    with RunWriter(folder) as writer:
        for layer, factor in (("up", 1e4), ("down", 1e6)):
            x = torch.randn(128, WIDTH)
            x[:2] *= factor
            key = SlotKey(layer, "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
            writer.tally(1, key, measure(x, ottava.quantize(x, RECIPES["tensorwise"].fprop.lhs)))
    table = Run.open(folder).table()
    assert [p.layer for p in fallback.on_look(1, table)] == ["down"]


def test_verification_has_the_last_word(looks: Looks) -> None:
    model = network()
    asked: list[Proposal] = []

    def no(net: nn.Module, proposal: Proposal) -> Verdict:
        asked.append(proposal)
        return Verdict(False, "no better")

    fallback = Fallback(model, mode="apply", patience=1, verify=no, cooldown=3)
    assert feed(fallback, looks, model, 1) == [["down -> fprop rowwise, wgrad bf16"]]
    assert fallback.applied == {}
    assert fallback.proposals[0].to_dict()["verified"] is False
    feed(fallback, looks, model, 3)
    assert len(asked) == 1


def test_replayed_gradient_verifies(looks: Looks) -> None:
    """Better where the layer is ill; not where it is well."""
    x = torch.randn(64, WIDTH)
    for massive, better in ((1e5, True), (1.0, False)):
        model = network(massive=1e5)
        fallback = Fallback(model, patience=1)
        feed(fallback, looks, model, 1)
        model.massive = massive
        verdict = by_gradient(lambda: x, loss, gain=0.5)(model, fallback.proposals[0])
        assert verdict.better == better, verdict.why
        assert "gradient error" in verdict.why


def test_fork_verifies_and_leaves_no_trace(looks: Looks) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = [torch.randn(64, WIDTH) for _ in range(8)]

    def step(x: Tensor) -> float:
        optimizer.zero_grad()
        value = loss(model, x)
        value.backward()
        optimizer.step()
        return value.item()

    step(data[0])
    fallback = Fallback(model, patience=1)
    feed(fallback, looks, model, 1)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    moments = copy.deepcopy(optimizer.state_dict()["state"])
    verdict = by_fork(optimizer, step, lambda: data)(model, fallback.proposals[0])
    assert verdict.better, verdict.why
    assert "fork of 8 steps" in verdict.why
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    now = optimizer.state_dict()["state"]
    assert all(torch.equal(now[i][k], moments[i][k]) for i in moments for k in moments[i])
    assert torch.equal(torch.get_rng_state(), random)
    assert str(model.down.resolved.fprop.lhs) == "E4M3[tensor]"


def test_after_a_spike_without_patience(looks: Looks) -> None:
    model = network()
    fallback = Fallback(model, mode="apply", patience=100)
    spike = Spike(9, 3.0, 20.0, 5, "fp8", 1.0, "held")
    assert fallback.on_spike(model, spike) == []
    feed(fallback, looks, model, 1)
    (proposal,) = fallback.on_spike(model, spike)
    assert (proposal.layer, proposal.step, proposal.applied) == ("down", 9, True)


def test_events(looks: Looks, tmp_path: Path) -> None:
    model = network()
    with RunWriter(tmp_path / "events") as writer:
        feed(Fallback(model, mode="apply", patience=1, log=writer), looks, model, 1)
    (event,) = Run.open(tmp_path / "events").events
    assert (event["kind"], event["layer"], event["gemm"]) == ("fallback", "down", "fprop,wgrad")
    assert (event["from"], event["to"], event["applied"]) == ("tensorwise", "fprop rowwise, wgrad bf16", True)
    assert "underflow" in event["why"]


def test_simulated_casts_are_no_evidence(looks: Looks) -> None:
    """Rows of recipes that nobody runs say nothing about the run."""
    model = network()
    table = looks.at(model)
    table.columns["source"][:] = "hook"
    assert Fallback(model, mode="apply", patience=1).on_look(1, table) == []
    empty = table.where(source="door")
    assert Fallback(model, patience=1).on_look(1, empty) == []


@pytest.mark.parametrize(("wrong", "says"), [({"mode": "aply"}, "apply"), ({"candidates": ["rowise"]}, "rowwise")])
def test_bad_settings(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Fallback(network(), **wrong)
    with pytest.raises(ValueError, match="no ottava layers"):
        Fallback(nn.Linear(4, 4))
