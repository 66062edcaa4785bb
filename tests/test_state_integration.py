"""Nothing that training does between two boundaries moves a scale: pipelines, errors, evaluation.

The witness is always a plain run of the same model on the same data: all parameters, gradients, buffers and staged
amaxes are compared bit for bit.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ottava
from scaling_samples import (
    WIDTH,
    differences,
    doors,
    lengths,
    loss_of,
    network,
    noise,
    sgd,
    snapshot,
    state_of,
    train,
    windows,
    with_cells,
)

# --- order ----------------------------------------------------------------------------------------------------------


def pipeline(schedule: str) -> list[dict[str, Tensor]]:
    """Two stages of a pipeline on one process, four micro-batches a step, three steps; `schedule` like "F0 F1 B0"."""
    stages = [network(seed=seed) for seed in (1, 2)]
    optimizers = [sgd(stage) for stage in stages]
    for step in range(3):
        sent: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        for action in schedule.split():
            if action.startswith("F"):
                y = stages[0](noise(10 * step + int(action[1:])))
                received = y.detach().requires_grad_()
                sent[action[1:]] = y, received, loss_of(stages[1], received)
            else:
                y, received, loss = sent.pop(action[1:])
                loss.backward()
                y.backward(received.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [snapshot(stage) for stage in stages]


@pytest.mark.parametrize("schedule", ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 F1 F2 F3 B0 B1 B2 B3"], ids=["1F1B", "GPipe"])
def test_pipeline_order_changes_no_bit(schedule: str) -> None:
    """Scales are constants between steps, so the order of micro-batches through a stage is nobody's business."""
    for got, expected in zip(pipeline(schedule), pipeline("F0 B0 F1 B1 F2 B2 F3 B3"), strict=True):
        assert differences(got, expected) == []


def test_second_backward_repeats_the_first() -> None:
    """retain_graph: twice the gradient exactly, and the same amaxes again (TE loses what it saved)."""
    model = network()
    train(model, range(2))
    model.zero_grad()
    loss = loss_of(model, noise(2))
    loss.backward(retain_graph=True)
    once = snapshot(model)
    loss.backward()
    twice = snapshot(model)
    assert all(name.endswith(".grad") for name in differences(once, twice))
    assert all(torch.equal(twice[name], 2 * once[name]) for name in once if name.endswith(".grad"))


# --- exceptions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_is_no_boundary_and_training_goes_on(where: str) -> None:
    """Buffers as before; the next step's entry has nothing of what the broken pass saw."""
    model = network()
    optimizer = sgd(model)
    train(model, range(2), optimizer)
    optimizer.zero_grad()
    before = state_of(model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    register = model[2].register_forward_pre_hook if where == "forward" else model[0].register_full_backward_hook
    with register(interrupt), pytest.raises(KeyboardInterrupt), ottava.autocast("delayed"):
        loss_of(model, 8 * noise(2)).backward()
    assert differences(state_of(model), before) == []
    train(model, [3], optimizer)
    assert lengths(model) == [3] * 6
    assert windows(model)[0][0] == noise(3).abs().max().item()
    assert all(door.staged.count_nonzero() == 0 for door in doors(model).values())
    train(model, [4], optimizer)
    assert windows(model)[0][0] == noise(4).abs().max().item()


# --- evaluation -----------------------------------------------------------------------------------------------------


@contextmanager
def no_context() -> Iterator[None]:
    yield


EVALUATIONS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], ...]] = {
    "no_grad": (torch.no_grad,),
    "inference_mode": (torch.inference_mode,),
    "bf16": (torch.no_grad, lambda: ottava.autocast(enabled=False)),
    "bf16 with gradients": (no_context, lambda: ottava.autocast(enabled=False)),
    "tensorwise": (torch.no_grad, lambda: ottava.autocast("tensorwise")),
    "another window": (torch.no_grad, lambda: ottava.autocast(with_cells("delayed", amax_history_len=7))),
    "another format": (torch.inference_mode, lambda: ottava.autocast(with_cells("delayed", format=ottava.E4M3))),
    "guarded": (torch.no_grad, lambda: ottava.autocast("guarded")),
    "te timing": (torch.no_grad, lambda: ottava.autocast(update="autocast")),
}


def evaluate(model: nn.Module, contexts: tuple[Callable[[], AbstractContextManager[Any]], ...]) -> None:
    """A validation set 100 times larger than the training data, with a NaN."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        for poison in (100.0, math.nan):
            model(noise(77) * poison)


@pytest.mark.parametrize("recipe", ["delayed", "guarded"])
@pytest.mark.parametrize("contexts", EVALUATIONS.values(), ids=EVALUATIONS.keys())
def test_evaluation_in_between_leaves_no_trace(
    contexts: tuple[Callable[[], AbstractContextManager[Any]], ...], recipe: str
) -> None:
    """Before training, between forward and backward, between micro-batches and between steps: not one bit differs."""
    plain, evaluated = network(recipe), network(recipe)
    optimizers = [sgd(plain), sgd(evaluated)]
    evaluate(evaluated, contexts)
    for step in range(3):
        results = []
        for model, optimizer in zip((plain, evaluated), optimizers, strict=True):
            for i in range(2):
                loss = loss_of(model, noise(10 * step + i))
                if model is evaluated:
                    evaluate(model, contexts)
                loss.backward()
                if model is evaluated:
                    evaluate(model, contexts)
            optimizer.step()
            results.append((loss.item(), snapshot(model)))
        assert results[0][0] == results[1][0]
        assert differences(results[0][1], results[1][1]) == []


# --- another recipe in the middle of a run --------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 5])
@pytest.mark.parametrize("way", ["convert", "autocast"])
def test_a_new_window_keeps_the_newest_and_says_so(way: str, length: int) -> None:
    """Four entries in windows of 16; with 2 the newest two stay. The next step goes on from the new scale."""
    model, recipe = network(), with_cells("delayed", amax_history_len=length)
    optimizer = sgd(model)
    train(model, range(4), optimizer)
    before = windows(model)
    with warnings.catch_warnings(record=True) as said, ottava.autocast(recipe if way == "autocast" else None):
        warnings.simplefilter("default")
        if way == "convert":
            ottava.convert(model, recipe)
            assert windows(model) == [w[:length] for w in before]
        train(model, [4], optimizer)
    assert [str(w.message).split(":")[0] for w in said] == [f"amax_history_len changed from 16 to {length}"]
    assert [w[1:] for w in windows(model)] == [w[: length - 1] for w in before]
    with warnings.catch_warnings(), ottava.autocast(recipe):
        warnings.simplefilter("error")
        train(model, [5], optimizer)


# --- compiled, and without waiting for the device -------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["delayed", "guarded"])
def test_compiled_training_has_the_bits_of_eager_training(recipe: str) -> None:
    """Compiled once; state included, with an evaluation in between and the boundary found as ever."""
    eager, compiled = network(recipe), network(recipe)
    ottava.ScalingState(compiled)  # made by hand: it hears of no compiled forward, and listens all the same
    torch._dynamo.reset()
    graphs = 0
    call = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    optimizers = [sgd(eager), sgd(compiled)]
    for step in range(4):
        for f, optimizer in zip((eager, call), optimizers, strict=True):
            optimizer.zero_grad()
            with torch.no_grad():
                f(noise(50 + step) * 100)
            loss_of(f, noise(step)).backward()
            optimizer.step()
        assert differences(snapshot(eager), snapshot(compiled)) == []
        if step == 0:
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs  # training and evaluation, once each
    assert lengths(compiled) == [4] * 6


@pytest.mark.parametrize("update", ["step", "autocast"])
def test_a_compiled_model_moves_its_scales_under_an_autocast(update: Any) -> None:
    """Converted with another recipe: the first forward makes the buffers, uncompiled. TE's timing never is compiled."""
    eager, compiled = network("tensorwise"), network("tensorwise")
    torch._dynamo.reset()
    call = torch.compile(compiled, backend="aot_eager")
    for model, f in ((eager, eager), (compiled, call)):
        optimizer = sgd(model)
        for step in range(4):
            with ottava.autocast("delayed" if step < 3 else None, update=update):
                loss = loss_of(f, noise(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert lengths(compiled) == [3] * 6
    assert differences(snapshot(eager), snapshot(compiled)) == []


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a device: reading a number back, or making a tensor from Python numbers."""

    WAITS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "lift_fresh", "_to_copy")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.WAITS and not (name == "_to_copy" and (kwargs or {}).get("device") is None):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_a_boundary_reads_nothing_back() -> None:
    """Neither a number nor a copy between host and device, once the buffers have been packed by the first one."""
    model = network(ottava.get_recipe("delayed").override("2", "guarded"))
    optimizer, state = sgd(model), ottava.ScalingState(model)
    train(model, range(2), optimizer)
    loss_of(model, noise(2)).backward()
    with Reads() as counted:
        state.update()
    assert counted.seen == []
    assert lengths(model) == [3] * 6


@pytest.mark.parametrize("recipe", ["delayed", "guarded"])
def test_training_runs_where_nothing_can_be_read(recipe: str) -> None:
    """On the meta device, which has no numbers, whoever asks for one gets an exception: two steps and an evaluation.

    What reads on a CPU (the checksum of a weight, the decoder's look at the largest value) is for CPUs only.
    """
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).bfloat16()
        x = torch.empty(8, WIDTH, dtype=torch.bfloat16)
    ottava.convert(model, recipe)
    optimizer = sgd(model)
    for _ in range(2):
        loss_of(model, x).backward()
        optimizer.step()
        with torch.no_grad():
            model(x)
    assert model[0].scaling_state.boundaries == 2
    assert {buffer.device.type for door in doors(model).values() for buffer in door.buffers()} == {"meta"}
    with pytest.raises(RuntimeError, match="meta"):
        loss_of(model, x).item()
