"""When predicted scales move: once per optimizer step, found without the user, and nothing that outlives a model."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava.engine.quantizer import Quantizer
from ottava.engine.state import roll_windows
from ottava.numerics.formats import E4M3, E5M2
from ottava.numerics.tensor import QuantizationSpec
from scaling_samples import (
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
    with_cells,
)

# --- the rule -------------------------------------------------------------------------------------------------------


def test_worked_example() -> None:
    """Window 4, max, E4M3; amax 2, 4, 1, idle, 8. The first step takes 448 / 2; 4 * 224 = 8 * 112 = 896 saturate."""
    model = network(with_cells("delayed", amax_history_len=4))
    optimizer, door = sgd(model, lr=0.0), door_of(model)
    history = []
    for amax in (2.0, 4.0, 1.0, None, 8.0):
        clipped = None
        if amax is not None:
            with ottava.debug.observe(model) as seen:
                model(batch(amax)).sum().backward()
            row = seen.table()[0]
            assert (row["layer"], row["tensor"], row["amax"]) == ("0", "input", amax)
            clipped = row["overflow_pct"] > 0
        optimizer.step()
        history.append((clipped, door.amax_history.tolist(), door.scale.item()))
    assert history == [
        (False, [2, 0, 0, 0], 224),
        (True, [4, 2, 0, 0], 112),
        (False, [1, 4, 2, 0], 112),
        (None, [1, 4, 2, 0], 112),
        (True, [8, 1, 4, 2], 56),
    ]


@pytest.mark.parametrize("length", [1, 2, 5, 16])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_windows_follow_a_deque(algorithm: str, length: int) -> None:
    """60 steps of 0 to 3 micro-batches, some all zero, some infinite, against the rule in plain Python."""
    model = network(with_cells("delayed", amax_history_len=length, amax_compute_algo=algorithm), layers=1)
    optimizer, door = sgd(model, lr=0.0), door_of(model)
    rng, window, nonfinite, scale = random.Random(length), deque[float](maxlen=length), 0, 0.0
    for _ in range(60):
        seen = [rng.choice([0.0, math.inf, *(2.0 ** rng.randrange(-9, 9) * 1.25 for _ in range(8))]) for _ in range(3)]
        for amax in seen[: rng.randrange(4)]:
            model(batch(amax)).sum().backward()
        finite = [door.staged[0].item()] if door.staged[0] > 0 else []
        nonfinite += int(door.staged[1].item())
        optimizer.step()
        if finite:
            window.appendleft(finite[0])
            largest = max(window) if algorithm == "max" else window[0]
            scale = torch.tensor(448 / largest, dtype=torch.float64).float().item()
        assert door.amax_history.tolist()[: len(window)] == list(window)
        assert (door.scale.item(), door.nonfinite_count.item()) == (scale, nonfinite)
    assert nonfinite > 5


def test_a_part_of_a_boundary_moves_its_doors_only() -> None:
    """As TransformerEngine has it: inputs and weights where the forward ends, gradients where the backward does."""
    model = network()
    state = ottava.ScalingState(model)
    loss_of(model, noise(0)).backward()
    state.update("forward")
    assert lengths(model) == [1, 1, 0] * 2
    state.update("backward")
    assert lengths(model) == [1] * 6
    assert state.boundaries == 2


def test_a_state_says_whether_it_predicts() -> None:
    """A model without predicted scales, one with them, and one that takes up a delayed recipe later."""
    current, delayed = network("tensorwise"), network("delayed")
    assert [ottava.ScalingState(model).predicts for model in (current, delayed)] == [False, True]
    with ottava.autocast("delayed"):
        loss_of(current, noise(0))
    assert ottava.ScalingState(current).predicts is True


def test_boundaries_of_a_capture_are_taken_back_and_told_of_each_replay() -> None:
    """A CUDA graph's capture runs Python once; each replay writes its amaxes, and may change the weights."""
    model = network()
    state = ottava.ScalingState(model)
    loss_of(model, batch(8.0)).backward()
    state.update()
    before = state.boundaries
    model(batch(2.0)).sum().backward()
    state.update()
    captured = state.take_back(before)
    assert (captured[0], state.boundaries) == (1, before)
    assert next(entry.amax for entry in state.take_amax() if entry.tensor == "input") == 8.0
    with torch.no_grad():
        model(noise(0))
    for count in (1, 2):
        state.repeat(captured)
        assert state.boundaries == before + count
        assert next(entry.amax for entry in state.take_amax() if entry.tensor == "input") == 2.0
    assert all(door.cached is None for door in state.weight_doors())


def test_a_copied_state_moves_the_layers_that_are_its_own() -> None:
    """A second state took one layer over: in a copy of the model that layer is the second state's copy's."""
    model = network()
    states = ottava.ScalingState(model), ottava.ScalingState(model[0])
    twin = copy.deepcopy(model)
    assert twin[2].scaling_state not in states
    for layer, expected in ((2, [0, 0, 0, 1, 1, 1]), (0, [1] * 6)):
        loss_of(twin, noise(0)).backward()
        twin[layer].scaling_state.update()
        assert lengths(twin) == expected


def test_weight_history_sees_the_weight() -> None:
    """The weight's window holds max|w| of each step, before the optimizer moved it."""
    model = network()
    optimizer, seen = sgd(model, lr=1.0), []
    for step in range(3):
        seen.insert(0, float(model[0].weight.detach().abs().max()))
        train(model, [step], optimizer)
    assert len(set(seen)) == 3
    assert windows(model, "weight")[0] == seen


# --- the boundary is found ------------------------------------------------------------------------------------------


def test_a_plain_loop_is_enough() -> None:
    """Recipe from `convert` or from `autocast` around the forward: the same bits, and one entry a step."""
    converted, asked = network("delayed"), network("tensorwise")
    optimizers = [sgd(converted), sgd(asked)]
    for step in range(4):
        train(converted, [step], optimizers[0])
        with ottava.autocast("delayed"):
            loss = loss_of(asked, noise(step))
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
    assert lengths(converted) == [4] * 6
    assert differences(snapshot(converted), snapshot(asked)) == []


def test_an_optimizer_made_before_the_conversion_is_seen() -> None:
    """`convert` keeps the Parameters, so what the optimizer holds is still the model's."""
    model = nn.Sequential(nn.Linear(32, 32)).bfloat16()
    optimizer = sgd(model)
    ottava.convert(model, "delayed")
    train(model, range(3), optimizer)
    assert lengths(model) == [3] * 3


def test_an_explicit_update_makes_no_second_boundary() -> None:
    """Called besides the hook, before or after it or twice, update() changes nothing."""
    plain, explicit = network(), network()
    optimizers = [sgd(plain), sgd(explicit)]
    for step in range(4):
        train(plain, [step], optimizers[0])
        optimizers[1].zero_grad()
        loss_of(explicit, noise(step)).backward()
        if step == 2:
            ottava.ScalingState(explicit).update()
        optimizers[1].step()
        for _ in range(step):
            ottava.ScalingState(explicit).update()
    assert differences(snapshot(plain), snapshot(explicit)) == []


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """As Muon and AdamW share a model: matrices here, vectors there."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return [torch.optim.SGD(matrices, lr=0.1), torch.optim.AdamW(vectors, lr=1e-2)]


def halves(model: nn.Sequential) -> list[torch.optim.Optimizer]:
    """One optimizer a layer."""
    return [sgd(model[0]), sgd(model[2])]


@pytest.mark.parametrize("split", [two_optimizers, halves])
@pytest.mark.parametrize("order", [1, -1])
def test_two_optimizers_are_one_step_of_each_layer(
    split: Callable[[Any], list[torch.optim.Optimizer]], order: int
) -> None:
    """Whoever steps first, each layer rolls when its own weight has been stepped."""
    model = network()
    optimizers = split(model)
    for step in range(3):
        loss_of(model, noise(step)).backward()
        for optimizer in optimizers[::order]:
            optimizer.step()
            optimizer.zero_grad()
    assert lengths(model) == [3] * 6


def test_a_layer_that_accumulates_longer_rolls_later() -> None:
    """The second layer is stepped every third time: one entry, the largest amax of three forwards."""
    model = network()
    optimizers = halves(model)
    for step in range(3):
        loss_of(model, noise(step)).backward()
        optimizers[0].step()
        assert [len(w) for w in windows(model)] == [step + 1, 0]
    largest = door_of(model, 2).staged[0].item()
    optimizers[1].step()
    assert windows(model)[1] == [largest]


def test_optimizer_in_backward_is_one_step() -> None:
    """Every parameter has an optimizer that steps as soon as its gradient is there, in the middle of the backward."""
    plain, fused = network(), network()
    own = {p: torch.optim.SGD([p], lr=0.05) for p in fused.parameters()}

    def step_now(p: Tensor) -> None:
        own[p].step()
        own[p].zero_grad()

    for p in fused.parameters():
        p.register_post_accumulate_grad_hook(step_now)
    optimizer = sgd(plain)
    for step in range(3):
        train(plain, [step], optimizer)
        loss_of(fused, noise(step)).backward()
    assert differences(state_of(plain), state_of(fused)) == []


def test_an_optimizer_of_another_model_is_no_boundary() -> None:
    """Nor is a step without a forward in between."""
    model, other = network(seed=1), network(seed=2)
    loss_of(model, noise(0)).backward()
    train(other, range(2))
    assert lengths(model) == [0] * 6
    optimizer = sgd(model)
    for _ in range(3):
        optimizer.step()
    assert lengths(model) == [1] * 6


def test_lbfgs_is_one_boundary_a_step() -> None:
    """Its closure runs many forwards while weights change; scales hold still until step() returns. Nothing is said."""
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    scales: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, noise(0))
        loss.backward()
        scales.append(door_of(model).scale.item())
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for steps in (1, 2):
            optimizer.step(closure)
            assert lengths(model) == [steps] * 6
    assert len(scales) > 4
    assert len(set(scales)) == 2  # none yet, then that of the first step


def test_skipped_steps_are_no_boundaries() -> None:
    """GradScaler leaves out step() when a gradient overflowed: no history takes its amaxes; inf is counted."""
    model = network()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    for step, poison in enumerate((1.0, math.inf, 1.0)):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, noise(step)) * poison).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [len(w) for w in windows(model)] == [2, 2]
    assert windows(model)[0][0] == noise(2).abs().max().item()
    assert door_of(model, 2, "grad_output").nonfinite_count.item() == 1
    assert all(door.scale.isfinite() for door in doors(model).values())


class Sam(torch.optim.Optimizer):
    """An optimizer around another, whose step runs the closure at a shifted point: two hooks fire for one step."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base

    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        with torch.no_grad():
            shifts = [0.01 * p.grad for group in self.param_groups for p in group["params"]]
            weights = [p for group in self.param_groups for p in group["params"]]
            torch._foreach_add_(weights, shifts)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            torch._foreach_sub_(weights, shifts)
        self.base.step()


def test_wrapped_optimizers_step_once() -> None:
    """The inner step() is the boundary; the outer one finds nothing left."""
    model = network()
    optimizer = Sam(sgd(model))
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, noise(step)).backward()
        optimizer.step(lambda step=step: loss_of(model, noise(step)).backward())
    assert lengths(model) == [3] * 6


def test_a_loop_without_an_optimizer_is_told_once_what_to_do() -> None:
    """Weights move and no boundary comes: one warning with the fix, and the fix works."""
    model = network()

    def step_by_hand(step: int) -> None:
        loss_of(model, noise(step)).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad  # type: ignore[operator]
                p.grad = None

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for step in range(5):
            step_by_hand(step)
    assert [str(w.message).split("call")[1].split(" after")[0].strip() for w in said] == [
        "ottava.ScalingState(model).update()"
    ]
    assert lengths(model) == [0] * 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            ottava.ScalingState(model).update()
            step_by_hand(step)
    assert lengths(model) == [3] * 6


@pytest.mark.filterwarnings("error")
def test_nothing_is_said_where_nothing_is_wrong() -> None:
    """300 layers in one forward, 40 micro-batches before the first step, evaluation before training."""
    deep = nn.Sequential(*(nn.Linear(32, 32) for _ in range(300))).bfloat16()
    ottava.convert(deep, "delayed")
    train(deep, range(2))
    model = network()
    with torch.no_grad():
        model(noise(0))
        model[0].weight.mul_(0.5)
    for step in range(40):
        loss_of(model, noise(step)).backward()
    sgd(model).step()
    assert lengths(model) == [1] * 6


def test_an_optimizer_that_holds_no_parameters_of_ours_can_be_attached() -> None:
    """fp32 master copies outside the model: torch's hook sees strangers, `attach` says whose boundary it is."""
    model = network()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.05)
    handle = ottava.ScalingState(model).attach(optimizer)
    for step in range(3):
        loss_of(model, noise(step)).backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
            p.grad = None
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
    assert lengths(model) == [3] * 6
    handle.remove()
    optimizer.step()


# --- frozen, tied, mixed --------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen Linear with a low-rank path beside it, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(32, 32)
        self.lora_a, self.lora_b = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """base(x) + b(a(x))."""
        y: Tensor = self.base(x) + self.lora_b(self.lora_a(x))
        return y


def test_frozen_layers_move_with_the_adapters() -> None:
    """Only adapters are stepped; the frozen weights' scales stay constant, inputs and gradients have histories."""
    model = nn.Sequential(Adapted(), nn.GELU(), Adapted()).bfloat16()
    report = ottava.convert(model, "delayed")
    assert report.converted == ("0.base", "2.base")
    for name, p in model.named_parameters():
        p.requires_grad_("lora" in name)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    train(model, range(4), optimizer)
    assert [len(w) for w in windows(model)] == [4, 4]
    assert [len(set(w)) for w in windows(model, "weight")] == [1, 1]
    assert [len(w) for w in windows(model, "grad_output")] == [0, 4]  # nobody needs the dy of the first layer's input


def test_tied_weights_have_a_history_for_each_use() -> None:
    """Two layers with one Parameter: both roll when it is stepped, each with its own inputs."""
    model = network()
    model[2].weight = model[0].weight
    train(model, range(3))
    assert lengths(model) == [3] * 6
    assert windows(model, "weight")[0] == windows(model, "weight")[1]
    assert windows(model)[0] != windows(model)[1]


def test_two_recipes_in_one_model() -> None:
    """By override: delayed, guarded with its own window, and current scaling side by side, each by its own rule."""
    guarded = with_cells("guarded", amax_history_len=2)
    recipe = ottava.get_recipe("delayed").override("2", guarded).override("4", "tensorwise")
    model = network(recipe, layers=3)
    train(model, range(4))
    assert [len(w) for w in windows(model)] == [4, 2]
    assert {name.split(".")[0] for name in state_of(model)} == {"0", "2"}
    expected = [448 / max(windows(model)[0]), 224 / max(windows(model)[1])]  # guarded keeps one octave free
    assert [door_of(model, layer).scale for layer in (0, 2)] == [torch.tensor(e, dtype=torch.float32) for e in expected]


# --- windows ---


def test_each_door_moves_by_its_own_spec_and_only_where_due() -> None:
    """Two specs, an idle door, one that is not due, one without state: amax in front, scale = max / largest."""
    newest = QuantizationSpec(E5M2, scaling="delayed", amax_history_len=2, amax_compute_algo="most_recent")
    largest = QuantizationSpec(E4M3, scaling="delayed", amax_history_len=3)
    doors = [Quantizer() for _ in range(5)]
    for door, spec in zip(doors, (largest, newest, largest, largest), strict=False):
        door.prepare(spec)
        door.staged.fill_(9.0)
    for amaxes in ([7.0, 4.0, 0.0, 1.0, 5.0], [3.5, 2.0, 0.0, 1.0, 5.0]):
        lanes = torch.zeros(4, 5)
        lanes[0], lanes[3] = torch.tensor(amaxes), torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0])
        roll_windows(doors, lanes * lanes[3])
    assert [door.amax_history.tolist() for door in doors[:4]] == [[3.5, 7, 0], [2, 4], [0, 0, 0], [0, 0, 0]]
    assert [float(door.scale) for door in doors[:4]] == [64.0, 57344 / 2, 0.0, 0.0]
    assert [float(door.staged[0]) for door in doors[:4]] == [0.0, 0.0, 0.0, 9.0]
