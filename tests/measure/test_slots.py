"""Slots of a model against `observe` of the same steps; the interpreter stands in for a GPU, or -m gpu."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ottava.measure import observer as slots_module
from ottava.measure.observer import Slots, observe
from ottava.measure.tally import Tally
from scaling_samples import two_linears
from triton_mode import DEVICE, ON_GPU, with_triton

pytestmark = with_triton()
COUNTS = ("n", "n_total", "n_nonzero", "n_underflow", "n_subnormal", "n_overflow", "n_casts", "amax", "amin")


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes everything, as it does on a GPU."""
    if not ON_GPU:
        monkeypatch.setattr(slots_module, "supports_statistics", lambda x, x_q: None)


def network(recipe: str) -> nn.Sequential:
    return two_linears(recipe, width=40, hidden=32).to(DEVICE)


def step(model: nn.Module, seed: int) -> Tensor:
    x = torch.randn(36, 40, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)
    y: Tensor = model(x)
    y.float().square().mean().backward()
    return y.detach()


@pytest.mark.parametrize("recipe", ["blockwise", "delayed", "tensorwise"])
def test_all_tiles_are_what_an_observer_sees(recipe: str) -> None:
    """Every door, both directions, two micro-batches; and the numbers of the run are the same."""
    plain = step(network(recipe), 1)
    with observe(watched := network(recipe)) as seen:
        step(watched, 1)
        step(watched, 2)
    with Slots(model := network(recipe), every=1) as slots:
        assert torch.equal(step(model, 1), plain)
        step(model, 2)
    found = slots.tallies()
    assert found.keys() == seen.tallies.keys()
    assert slots.refused == {}
    for key, truth in seen.tallies.items():
        assert [getattr(found[key], name) for name in COUNTS] == [getattr(truth, name) for name in COUNTS]
        assert found[key].see == pytest.approx(truth.see, rel=1e-5)
        assert (found[key].exponents == truth.exponents).all()


def test_a_block_that_decodes_to_nan_is_measured_as_an_observer_does() -> None:
    """An infinity under MXFP4: the finite numbers of its block count, by the scale 1 of their codes."""
    x = torch.randn(36, 40).bfloat16().to(DEVICE)
    x[3, 5] = torch.inf
    with observe(watched := network("mxfp4")) as seen, Slots(watched, every=1) as slots:
        watched(x)
    key = next(key for key in seen.tallies if key[:2] == ("0", "input"))
    found, wanted = slots.tallies()[key], seen.tallies[key]
    assert [getattr(found, name) for name in COUNTS] == [getattr(wanted, name) for name in COUNTS]
    assert found.see == pytest.approx(wanted.see, rel=1e-5)


def test_samples_rotate_and_add_up() -> None:
    """Three steps of one batch, a third of the tiles each: every element once."""
    with Slots(model := network("tensorwise"), every=3) as slots:
        for _ in range(3):
            step(model, 1)
            slots.advance()
    tally = slots.tallies()[("0", "input", "row", model[0].resolved.fprop.lhs)]
    assert (tally.n, tally.n_total, tally.n_casts) == (36 * 40, 3 * 36 * 40, 3)


def test_off_sees_nothing_and_clear_forgets() -> None:
    with Slots(model := network("tensorwise"), every=1) as slots:
        step(model, 1)
        slots.clear()
        slots.switch(False)
        step(model, 1)
        assert all(tally == Tally() for tally in slots.tallies().values())
        slots.switch(True)
        step(model, 1)
    once = slots.tallies()
    step(model, 1)
    assert slots.tallies() == once
    assert all(tally.n_casts == 1 for tally in once.values())


def test_what_cannot_be_looked_at_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module, "supports_statistics", lambda x, x_q: "triton: not today")
    with Slots(model := network("tensorwise")) as slots:
        step(model, 1)
    assert slots.tallies() == {}
    assert len(slots.refused) == 6
    assert set(slots.refused.values()) == {"triton: not today"}
    with pytest.raises(ValueError, match="Slots: every is 0; needs 1"):
        Slots(model, every=0)
    with pytest.raises(ValueError, match="Slots: detail is 'blocks'; needs 'numbers' or 'exponents'"):
        Slots(model, detail="blocks")


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_a_captured_step_goes_on_counting() -> None:
    """Forward and backward in a CUDA graph: phase and switch are those of each replay."""
    model, x = network("tensorwise"), torch.randn(64, 40, device="cuda", dtype=torch.bfloat16)
    with Slots(model, every=2) as slots:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(x).sum().backward()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x).sum().backward()
            slots.advance()
    slots.clear()
    for _ in range(2):
        graph.replay()
    slots.switch(False)
    graph.replay()
    tally = slots.tallies()[("0", "input", "row", model[0].resolved.fprop.lhs)]
    assert (tally.n, tally.n_casts) == (64 * 40, 2)
