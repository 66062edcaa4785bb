"""A step as a CUDA graph: here with a stand-in for the graph, on a GPU (-m gpu) with the graph, equal to eager's bits.

The stand-in keeps the promises of CUDA graphs that matter: a capture changes no number, and a replay reads the static
inputs and writes into the outputs of the capture.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.engine import quantizer
from ottava.engine.quantizer import WeightQuantizer
from ottava.nn import graphed
from ottava.nn.graphed import GraphedStep, graphed_step
from scaling_samples import (
    WIDTH,
    differences,
    door_of,
    doors,
    everything,
    loss_of,
    network,
    noise,
    sgd,
    snapshot,
    unchanged,
)

ON_GPU = torch.cuda.is_available()
gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
Step = Callable[..., Any]


class Tape:
    """A graph on a CPU; the numbers of `model` are what a capture must leave alone."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.did, self.lanes = model, [], []
        self.inputs: tuple[Tensor, ...] = ()

    def warm_up(self, work: Step) -> Any:
        self.did.append("warm-up")
        return work()

    def capture(self, work: Step) -> Any:
        self.did.append("capture")
        numbers = [
            *self.inputs,
            *(t.detach() for t in self.model.parameters()),
            *self.model.buffers(),
            *(d.staged for d in doors(self.model).values() if d.spec),
        ]
        before, seed = [t.clone() for t in numbers], torch.get_rng_state()
        self.work, self.outputs = work, work()
        unread = [list(m.scaling_state._unread)[-1:] for m in self.model.modules() if isinstance(m, ottava.nn.Linear)]
        self.captured = [lanes for _, _, lanes in unread[0]] if unread else []
        with torch.no_grad():
            for tensor, old in zip(numbers, before, strict=True):
                tensor.copy_(old)
        torch.set_rng_state(seed)
        return self.outputs

    def replay(self) -> None:
        self.did.append("replay")
        states = [m.scaling_state for m in self.model.modules() if isinstance(m, ottava.nn.Linear)][:1]
        counts = [state.boundaries for state in states]
        result = self.work().detach()
        for state, count in zip(states, counts, strict=True):
            _, entries = state.take_back(count)  # a replay runs no Python, but its kernels write the amaxes
            self.lanes = [lanes for _, _, lanes in entries]
        for old, new in zip(self.captured, self.lanes, strict=True):
            old.copy_(new)
        self.outputs.detach().copy_(result)


def training(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int = 1) -> Step:
    """One step of training."""

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        for part in x.chunk(micro_batches):
            loss = loss_of(model, part)
            loss.backward()
        optimizer.step()
        return loss

    return step


def taped(recipe: str, **options: Any) -> tuple[nn.Module, GraphedStep, Tape]:
    model = network(recipe)
    tape = Tape(model)
    return model, GraphedStep(training(model, sgd(model), **options), (noise(0),), tape, 2), tape


def test_an_autocast_around_a_replay_was_heard_in_the_capture() -> None:
    """A replay runs no layer's Python; the autocast does not say that none of ours ran."""

    class Silent(Tape):
        def replay(self) -> None:
            self.did.append("replay")

    model = network("tensorwise")
    tape = Silent(model)
    step = GraphedStep(training(model, sgd(model)), (noise(0),), tape, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            with ottava.autocast("rowwise"):
                step(noise(0))
    assert tape.did == ["warm-up", "capture", "replay", "replay"]


# --- what a step is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "guarded"])
def test_every_call_is_one_step_with_the_bits_of_eager_code(recipe: str) -> None:
    """Warm-ups, the capture's call and replays: losses, parameters, histories and what is staged."""
    model, step, tape = taped(recipe)
    eager = network(recipe)
    expected, got = training(eager, sgd(eager)), []
    for i in range(6):
        got.append(step(noise(i)))
        assert torch.equal(got[-1], expected(noise(i)))
    assert differences(snapshot(model), snapshot(eager)) == []
    assert tape.did == ["warm-up", "warm-up", "capture", *["replay"] * 4]
    assert len({float(loss) for loss in got}) == 6  # kept: a replay wrote over none of them
    assert not any(loss.requires_grad for loss in got)


def test_the_last_warm_up_finds_scales_where_the_capture_does() -> None:
    """Also where it is the first: at another alignment Triton would have to compile a kernel in the capture."""
    model, seen = network("delayed"), list[list[int]]()
    inner = training(model, sgd(model))

    def train(x: Tensor) -> Tensor:
        seen.append([door.scale.data_ptr() for door in doors(model).values() if door.spec])
        return inner(x)

    step = GraphedStep(train, (noise(0),), Tape(model), 1)
    step(noise(0))
    step(noise(1))
    assert seen[0] == seen[1]


def test_boundaries_of_replays_are_counted_and_their_amaxes_told() -> None:
    """Python does not run in a replay; what asks once a step gets each step's amaxes."""
    model, step, _ = taped("delayed")
    eager = network("delayed")
    expected = training(eager, sgd(eager))
    states = [ottava.ScalingState(m) for m in (model, eager)]
    for i in range(5):
        step(noise(i))
        expected(noise(i))
        told, truth = ([entry.amax for entry in state.take_amax()] for state in states)
        assert told == truth
        assert all(amax > 0 for amax in told)
        assert [state.boundaries for state in states] == [i + 1] * 2


def test_a_capture_that_changes_nothing_counts_nothing() -> None:
    """The step that captures is one step: its boundary is that of its replay."""
    state = ottava.ScalingState(network("delayed"))
    before = state.boundaries
    state.update()
    state.update()
    noted, entries = state.take_back(before)
    assert (noted, len(entries), state.boundaries) == (2, 0, before)  # nothing was staged, so nothing due
    state.repeat((noted, entries))
    assert state.boundaries == before + 2


def test_the_caller_keeps_its_arguments() -> None:
    """They are copied: the step may write to its input."""

    def step(x: Tensor) -> Tensor:
        return x.mul_(2).sum()

    tape = Tape(nn.Identity())
    run = GraphedStep(step, (torch.zeros(3),), tape, 1)
    tape.inputs = run._static
    for value in (1.0, 2.0, 3.0):
        x = torch.full((3,), value)
        assert run(x) == 6 * value
        assert x.tolist() == [value] * 3


# --- kept casts of weights -------------------------------------------------------------------------------------------


@pytest.fixture
def weight_casts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of what doors cast, by the rules of an accelerator whose stream is capturing when `Tape` is."""
    seen: list[int] = []
    real = quantizer.cast_both

    def spy(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(x.data_ptr())
        return real(x, *args, **kwargs)

    monkeypatch.setattr(quantizer, "cast_both", spy)
    monkeypatch.setattr(quantizer.Quantizer, "cast", staticmethod(spy))
    monkeypatch.setattr(quantizer, "_on_accelerator", lambda x: x.device.type != "meta")
    return seen


def test_a_captured_step_casts_each_weight_anew_and_once(weight_casts: list[int]) -> None:
    """Whatever was kept before: a capture that found it would replay with the weights of that day."""
    model, step, tape = taped("tensorwise", micro_batches=2)
    ottava.ScalingState(model).listen(moves=False)
    inner, counts = tape.capture, []

    def capture(work: Step) -> Any:
        weight_casts.clear()
        result = inner(work)
        counts.append(weight_casts.count(model[2].weight.data_ptr()))
        return result

    tape.capture = capture  # type: ignore[method-assign]
    for i in range(4):
        step(noise(i))
    assert counts == [1]
    door = door_of(model, 2, "weight")
    assert isinstance(door, WeightQuantizer)
    assert (door.cached, door.graph) == (None, None)


def test_a_captured_micro_batch_does_not_find_the_cast_of_its_warm_up(weight_casts: list[int]) -> None:
    """The optimizer is outside of the graph: what the warm-up kept is still valid, and would be frozen in."""
    model = network("tensorwise")
    ottava.ScalingState(model).listen(moves=False)
    optimizer, tape = sgd(model), Tape(model)

    def micro_batch(x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        loss.backward()
        return loss

    micro_batch(noise(0))
    micro_batch(noise(1))
    optimizer.step()  # from here on casts are kept
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # gradients add up in memory that stays
    step, address, counts = GraphedStep(micro_batch, (noise(0),), tape, 1), model[2].weight.data_ptr(), []
    for i in range(2):
        weight_casts.clear()
        step(noise(i))
        counts.append(weight_casts.count(address))
    assert tape.did == ["warm-up", "capture", "replay"]
    assert counts == [1, 2]  # the capture's, and what stands for its replay


def test_predicted_scales_stay_where_the_capture_found_them() -> None:
    """Also when it comes before the first boundary, which gives the doors of a model their common memory."""
    model = network("delayed")
    optimizer, stranger = sgd(model), network("delayed")

    def micro_batch(x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        loss.backward()
        return loss

    step = GraphedStep(micro_batch, (noise(0),), Tape(model), 1)
    step(noise(0))
    before = {name: everything(door) for name, door in doors(model).items()}
    graphed._pack(ottava.ScalingState(model))
    assert all(unchanged(door, before[name]) for name, door in doors(model).items())
    step(noise(1))
    addresses = [(d.scale.data_ptr(), d.staged.data_ptr()) for d in doors(model).values()]
    for i in range(2):
        optimizer.step()
        step(noise(i))
    assert [(d.scale.data_ptr(), d.staged.data_ptr()) for d in doors(model).values()] == addresses
    stranger.to(torch.float32)
    step(noise(2))
    model.to(torch.float32)  # doors keep their dtype, but not their memory
    with pytest.raises(RuntimeError, match="buffers of predicted scales were replaced since the capture"):
        step(noise(2))


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(ON_GPU, reason="there is a CUDA device")
def test_without_a_gpu_it_says_so() -> None:
    """And what to do; eager is a choice, never a fallback."""
    with pytest.raises(RuntimeError, match=r"CUDA graphs need a GPU.*graphed_step\(\.\.\., eager=True\)"):
        graphed_step(lambda x: x, torch.ones(2))


def test_eager_is_the_step_with_the_same_checks() -> None:
    """For a CPU, and to debug."""
    step = graphed_step(lambda x, n: x * n, torch.ones(2), 3, eager=True)
    assert step(torch.tensor([1.0, 2.0]), 3).tolist() == [3, 6]
    assert (step.calls, step.captured) == (1, False)
    for args, message in (
        ((torch.ones(3), 3), r"argument 0 is torch.float32 \(3,\); needs torch.float32 \(2,\), as the sample was"),
        ((torch.ones(2).bfloat16(), 3), r"argument 0 is torch.bfloat16 \(2,\); needs torch.float32"),
        ((2.0, 3), r"argument 0 is float ; needs torch.float32 \(2,\)"),
        ((torch.ones(2), 4), "argument 1 is 4, and 3 would be frozen into the graph"),
        ((torch.ones(2),), "got 1 arguments; needs 2"),
    ):
        with pytest.raises(ValueError, match=message):
            step(*args)


def test_samples_are_checked() -> None:
    """Before anything runs."""
    with pytest.raises(ValueError, match="warmup is 0; needs 1 or more"):
        graphed_step(lambda: None, warmup=0, eager=True)
    with pytest.raises(ValueError, match="argument 0 requires a gradient, which would land in a copy"):
        graphed_step(lambda x: x, torch.ones(2, requires_grad=True), eager=True)


def test_a_watch_is_refused_at_the_capture() -> None:
    """A replay runs no hooks: it would record nothing, and look as if nothing had happened."""
    _, step, _ = taped("tensorwise")
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        step(noise(0))
        step(noise(1))
        with pytest.raises(RuntimeError, match=r"as ottava\.watch does.*watch with eager=True"):
            step(noise(2))
    step(noise(2))
    assert step.captured


def test_a_failed_capture_says_what_a_step_must_not_do() -> None:
    """CUDA's own message is about streams; doors are released, and nothing counts as captured."""
    model, step, tape = taped("tensorwise")

    def fails(work: Step) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    tape.capture = fails  # type: ignore[method-assign]
    for i in range(2):
        step(noise(i))
    with pytest.raises(RuntimeError, match=r"not permitted when stream is capturing\n.*loss\.item\(\).*capturable"):
        step(noise(2))
    assert not step.captured
    assert getattr(door_of(model, 0, "weight"), "graph") is None  # noqa: B009


# --- on a device -----------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "rowwise", "blockwise", "delayed", "guarded"])
def test_graphs_have_the_bits_of_eager_code(recipe: str, micro_batches: int) -> None:
    """AdamW, dropout and several micro-batches: losses, parameters, histories."""
    results = []
    for eager in (True, False):
        model = nn.Sequential(network(recipe), nn.Dropout(0.1)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
        torch.cuda.manual_seed(0)
        step = graphed_step(training(model, optimizer, micro_batches), noise(0, 32).cuda(), eager=eager)
        losses = torch.stack([step(noise(i, 32).cuda()) for i in range(8)])
        results.append({**snapshot(model), "losses": losses})
    assert differences(*results) == []


@gpu
@pytest.mark.gpu
def test_reading_a_number_back_is_refused_with_advice() -> None:
    """And the process goes on."""
    layer = ottava.nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda")

    def step(x: Tensor) -> Tensor:
        y = layer(x).float().sum()
        return y * y.item()

    run = graphed_step(step, noise(0).cuda(), warmup=1)
    run(noise(0).cuda())
    with pytest.raises(RuntimeError, match=r"could not be captured.*\n.*loss\.item\(\)"):
        run(noise(0).cuda())
    assert layer(noise(0).cuda()).isfinite().all()


@gpu
@pytest.mark.gpu
def test_samples_must_be_on_one_gpu() -> None:
    with pytest.raises(ValueError, match="argument 0 is on cpu; needs to be on a CUDA device"):
        graphed_step(lambda x: x, torch.ones(2))
