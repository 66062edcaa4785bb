"""Calibration: histories of forward and backward from batches in BF16, and nothing else in the world has changed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.engine.quantizer import Quantizer, stage
from scaling_samples import (
    DELAYED,
    WIDTH,
    batch,
    differences,
    door_of,
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
)


class Noisy(nn.Module):
    """Dropout, running statistics and in-place activations: all that a look from the side could disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.norm, self.dropout = nn.BatchNorm1d(64), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        """(M, WIDTH) -> (M, WIDTH)."""
        hidden = nn.functional.silu(self.one(x), inplace=True)
        y: Tensor = self.two(self.dropout(nn.functional.relu_(self.norm(hidden))))
        return y


def noisy(seed: int = 0, recipe: str = "delayed") -> Noisy:
    torch.manual_seed(seed)
    model = Noisy().bfloat16()
    ottava.convert(model, recipe)
    return model


def everything_but_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in snapshot(model).items() if "quantizers" not in name}


def amaxes(model: nn.Module, x: Tensor, backward: Callable[[nn.Module, Tensor], Tensor]) -> dict[str, float]:
    """What the doors ought to see in BF16, from hooks of our own."""
    seen: dict[str, float] = {}
    handles = []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):

            def note(layer: nn.Module, args: tuple[Tensor, ...], y: Tensor, name: str = name) -> None:
                seen[f"{name}.quantizers.input"] = args[0].detach().abs().max().item()
                seen[f"{name}.quantizers.weight"] = layer.weight.detach().abs().max().item()
                key = f"{name}.quantizers.grad_output"
                y.register_hook(lambda dy: seen.__setitem__(key, dy.abs().max().item()))

            handles.append(layer.register_forward_hook(note))
    with ottava.autocast(enabled=False):
        backward(model, x).backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return seen


@pytest.mark.parametrize("recipe", ["delayed", "guarded"])
def test_histories_are_those_of_the_bf16_model(recipe: str) -> None:
    """Three batches: every window of every door, forward and backward, newest first, and its scale from the largest."""
    model = network(recipe)
    expected = [amaxes(copy.deepcopy(model), noise(step), loss_of) for step in range(3)]
    report = ottava.calibrate(model, [noise(step) for step in range(3)], loss=loss_of)
    for name, door in doors(model).items():
        assert door.amax_history.tolist()[:4] == [*(seen[name] for seen in reversed(expected)), 0], name
        assert door.spec is not None
        top = door.spec.format.max * 2.0**-door.spec.margin
        largest = max(seen[name] for seen in expected)
        assert torch.equal(door.scale, torch.tensor(top).div(torch.tensor(largest)))
        assert door.staged.count_nonzero() == 0
    rows = {f"{row.layer}.quantizers.{row.tensor}": row for row in report.rows}
    assert rows.keys() == doors(model).keys()
    assert all((row.steps, row.scale) == (3, door_of(model, row.layer, row.tensor).scale) for row in report.rows)
    assert report.to_dict()["rows"][0].keys() == {"layer", "tensor", "format", "steps", "amax", "scale", "nonfinite"}
    assert [line.split()[:4] for line in str(report).splitlines()[1:3]] == [
        ["0", "input", "E4M3", "3"],
        ["0", "weight", "E4M3", "3"],
    ]


def test_numbers_are_bit_for_bit_those_of_bf16() -> None:
    """Output, loss and every gradient inside the context, with dropout, in-place activations and running statistics."""
    model, twin = noisy(), noisy()
    results = []
    for m, calibrating in ((model, True), (twin, False)):
        torch.manual_seed(5)
        with ottava.autocast("delayed", calibrating=calibrating, enabled=False):
            y = m(noise(0))
            y.float().square().sum().backward()
        results.append({**everything_but_state(m), "y": y.detach(), "random": torch.rand(3)})
    assert differences(*results) == []
    assert lengths(model) == [1] * 6
    assert lengths(twin) == [0] * 6


def test_the_seeds_call_works() -> None:
    """with autocast(recipe, calibrating=True, enabled=False): model(x).sum().backward(), on any converted model.

    In TransformerEngine this is a silent no-op in Linear and LayerNormLinear, and leaves every scale at 1.
    """
    for converted_with in ("delayed", "tensorwise"):
        model = network(converted_with)
        for step in range(2):
            with ottava.autocast("delayed", calibrating=True, enabled=False):
                model(noise(step)).sum().backward()
        assert lengths(model) == [2] * 6
        assert all(door.scale > 0 for door in doors(model).values())
        model.zero_grad()
        with ottava.autocast("delayed"):
            train(model, [2])
        assert lengths(model) == [3] * 6


@pytest.mark.parametrize("recipe", ["delayed", "guarded"])
def test_calibration_leaves_the_model_as_it_was(recipe: str) -> None:
    """Parameters, gradients that wait for a step, buffers and random numbers: the very bits, and the very tensors."""
    model = noisy(recipe=recipe)
    loss_of(model, noise(0)).backward()
    gradients = [p.grad for p in model.parameters()]
    before, random = everything_but_state(model), torch.get_rng_state()
    ottava.calibrate(model, [noise(1), noise(2)], loss=loss_of)
    assert differences(everything_but_state(model), before) == []
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_is_no_boundary_and_loses_nothing(error: type[BaseException]) -> None:
    """In the second of two batches: one entry, and gradients, buffers and random state are back."""
    model = noisy()
    loss_of(model, noise(0)).backward()
    before, random = everything_but_state(model), torch.get_rng_state()

    def batches() -> Iterator[Tensor]:
        yield noise(1)
        yield noise(2) * math.pi

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        value = loss_of(m, x)
        if not torch.equal(x, noise(1)):
            raise error
        return value

    with pytest.raises(error):
        ottava.calibrate(model, batches(), loss=loss)
    assert [int(d.amax_history.count_nonzero()) for d in doors(model).values()] == [1] * 6
    assert differences(everything_but_state(model), before) == []
    assert torch.equal(torch.get_rng_state(), random)


def test_a_batch_may_be_a_tensor_a_tuple_or_a_mapping() -> None:
    """And the model may answer with a tensor, or with an object that has a loss or logits, as Hugging Face's do."""

    class Answer:
        def __init__(self, **fields: Tensor) -> None:
            self.__dict__.update(fields)

    class Wrapped(nn.Module):
        def __init__(self, field: str) -> None:
            super().__init__()
            self.inner, self.field = nn.Linear(WIDTH, WIDTH).bfloat16(), field

        def forward(self, x: Tensor, factor: float = 1.0) -> Any:
            y = self.inner(x) * factor
            return {"": y, "loss": Answer(loss=y.sum()), "logits": Answer(logits=y)}[self.field]

    for field in ("", "loss", "logits"):
        model = Wrapped(field)
        ottava.convert(model, "delayed")
        ottava.calibrate(model, [batch(1.0), (batch(1.0), 2.0), {"x": batch(1.0), "factor": 4.0}])
        assert windows(model, "grad_output") == [[4, 2, 1]]


def test_nonfinite_batches_are_left_out_and_reported() -> None:
    """One of three overflows: two entries, one counted."""
    model = network()
    report = ottava.calibrate(model, [noise(0), noise(1) * math.inf, noise(2)], loss=loss_of)
    row = report.rows[0]
    assert (row.steps, row.nonfinite, row.amax) == (2, 1, max(noise(i).abs().max().item() for i in (0, 2)))


def test_calibration_and_training_follow_each_other() -> None:
    """Calibrated entries stand behind those of training; what was staged for a step is not lost."""
    model = network()
    optimizer = sgd(model)
    ottava.calibrate(model, [batch(3.0)])
    train(model, [0], optimizer)
    assert windows(model)[0] == [noise(0).abs().max().item(), 3.0]
    before = state_of(model)
    with ottava.autocast(enabled=False):
        train(model, [1], optimizer)
    assert differences(state_of(model), before) == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_are_calibrated(reentrant: bool) -> None:
    """torch.utils.checkpoint inside: the same histories as without."""
    plain, recomputed = network(), network()
    ottava.calibrate(plain, [noise(0)], loss=loss_of)
    ottava.calibrate(
        recomputed,
        [noise(0)],
        loss=lambda m, x: checkpoint(m, x.requires_grad_(), use_reentrant=reentrant).float().square().mean(),
    )
    assert differences(state_of(plain), state_of(recomputed)) == []


def test_a_compiled_model_is_calibrated_and_trains_on_compiled() -> None:
    """Calibration runs its layers uncompiled; nothing of that sticks."""
    eager, compiled = network(), network()
    torch._dynamo.reset()
    call = torch.compile(compiled, backend="aot_eager")
    for model, f in ((eager, eager), (compiled, call)):
        ottava.calibrate(f, [noise(0), noise(1)], loss=loss_of)
        optimizer = sgd(model)
        for step in range(2, 4):
            loss_of(f, noise(step)).backward()
            optimizer.step()
    assert lengths(compiled) == [4] * 6
    assert differences(snapshot(eager), snapshot(compiled)) == []


def test_only_forward_can_be_calibrated() -> None:
    """Without a backward the gradients' doors stay empty and take the current scale at first."""
    model = network()
    with torch.no_grad(), ottava.autocast(calibrating=True, enabled=False):
        model(noise(0))
    assert [len(w) for w in windows(model)] == [1, 1]
    assert [len(w) for w in windows(model, "grad_output")] == [0, 0]


def test_what_cannot_be_calibrated_is_said() -> None:
    """A recipe without histories, a model that was not converted, no batch: got, needed, and what to do."""
    for recipe in ("tensorwise", "bf16"):
        with pytest.raises(
            ValueError, match=rf"found \['{recipe}'\]; only predicted scales have a history: use recipe"
        ):
            ottava.calibrate(network(recipe), [noise(0)])
    with pytest.raises(ValueError, match="no converted layer"):
        ottava.calibrate(nn.Linear(32, 32), [noise(0)])
    with pytest.raises(ValueError, match="got no batch; needs at least one"):
        ottava.calibrate(network(), [])
    with pytest.raises(ValueError, match="unknown recipe 'delaied'; did you mean 'delayed'"):
        ottava.calibrate(network(), [noise(0)], "delaied")


def test_gradients_are_seen_behind_an_in_place_activation_of_a_3d_output() -> None:
    """torch's linear gives a view of its result there, and nn.ReLU(inplace=True) cuts the view out of the graph."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(inplace=True)).bfloat16()
    ottava.convert(model, "delayed")
    x = torch.randn(3, 4, WIDTH).bfloat16()
    with ottava.autocast(enabled=False, calibrating=True):
        y = model(x)
        (2 * y).sum().backward()
    assert model[0].quantizers.grad_output.amax_history[0] == 2


def test_calibration_stages_the_amax_of_all_rows() -> None:
    """Of any number of dimensions, under a spec that is new to the door or known; nothing is cast, no guard fires."""
    door = Quantizer()
    for shape, value, staged in (((2, 3, 4), -5.0, [5, 0, 0]), ((4,), 9.0, [9, 0, 0]), ((2, 2), math.nan, [9, 1, 0])):
        x = torch.zeros(shape)
        x.view(-1)[-1] = value
        stage(door.calibrated(x, DELAYED))
        assert door.spec == DELAYED
        assert door.staged.tolist() == staged
    longer = replace(DELAYED, amax_history_len=9)
    with pytest.warns(UserWarning, match="amax_history_len changed"):
        stage(door.calibrated(torch.ones(2, 2), longer))
    assert (door.spec, len(door.amax_history), door.staged.tolist()) == (longer, 9, [9, 1, 0])
