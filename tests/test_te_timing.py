"""update="autocast" is TransformerEngine's delayed scaling, bit for bit, against a transcription that shares no code.

The transcription follows transformer_engine/common/recipe/delayed_scaling.cu (the fused update) and
pytorch/quantization.py (when it is called), release 2.20, in numpy. What ottava leaves out on purpose is tested at the
end: nothing moves when an exception unwinds, and evaluation stages nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.engine.quantizer import Quantizer
from ottava.recipe import Recipe
from scaling_samples import (
    BUFFERS,
    DELAYED,
    ROLES,
    amax_of,
    batch,
    cast,
    differences,
    door_of,
    doors,
    loss_of,
    network,
    noise,
    roll,
    snapshot,
    with_cells,
)

Direction = Literal["forward", "backward"]
FP8_MAX = {"E4M3": 448.0, "E5M2": 57344.0}


@dataclass
class Slot:
    """One column of TE's tensors: a scale, and a history whose row 0 is the staging slot."""

    length: int
    fp8_max: float
    margin: int
    algorithm: str
    scale: np.float32 = field(default_factory=lambda: np.float32(1.0))
    history: np.ndarray[Any, np.dtype[np.float32]] = field(init=False)

    def __post_init__(self) -> None:
        self.history = np.zeros(self.length, np.float32)

    def cast(self, amax: float) -> None:
        """cast/fp8/quantize_fp8.cuh: atomicMax into row 0, on the unscaled input."""
        self.history[0] = max(self.history[0], np.float32(amax))

    def update(self) -> None:
        """delayed_scaling.cu, the kernel: one thread block per scale; `a` of row i is row i + 1, or the last amax."""
        last = self.history[0]
        amax = np.float32(0.0)
        if last != 0:
            shifted = [self.history[i + 1] if i < self.length - 1 else last for i in range(self.length)]
            for i, a in enumerate(shifted):
                amax = max(amax, a)
                self.history[i] = a if i > 0 else np.float32(0.0)
        if self.algorithm == "most_recent":
            amax = last
        if np.isfinite(amax) and amax > 0:
            with np.errstate(over="ignore"):
                scale = np.float32(self.fp8_max * 2.0**-self.margin) / amax
            self.scale = np.finfo(np.float32).max if np.isinf(scale) else scale


class Manager:
    """FP8GlobalStateManager, as far as delayed scaling goes: every module that ran once is registered for good."""

    def __init__(self, length: int, margin: int, algorithm: str, formats: tuple[str, str, str]) -> None:
        self.new_slots: Callable[[], dict[str, Slot]] = lambda: {
            role: Slot(length, FP8_MAX[fmt], margin, algorithm) for role, fmt in zip(ROLES, formats, strict=True)
        }
        self.modules: dict[str, dict[str, Slot]] = {}
        self.is_first_module = False
        self.closes_backward: set[tuple[str, int]] = set()

    def enter(self) -> None:
        """autocast_enter at depth 0."""
        self.is_first_module = True

    def forward(self, module: str, call: int, amaxes: tuple[float, float], requires_grad: bool = True) -> None:
        """Linear.forward: casts, and the flag of the first module, which it takes if it will have a backward."""
        slots = self.modules.setdefault(module, self.new_slots())
        for role, amax in zip(ROLES, amaxes, strict=False):
            slots[role].cast(amax)
        if requires_grad and self.is_first_module:
            self.is_first_module = False
            self.closes_backward.add((module, call))

    def exit(self, grad_enabled: bool = True) -> None:
        """autocast_exit at depth 0."""
        if grad_enabled:
            self.reduce_and_update(ROLES[:2])

    def backward(self, module: str, call: int, amax: float) -> None:
        """Linear.backward: the cast, and at its end the update, if this module was the first in its autocast."""
        self.modules[module]["grad_output"].cast(amax)
        if (module, call) in self.closes_backward:
            self.closes_backward.discard((module, call))
            self.reduce_and_update(ROLES[2:])

    def reduce_and_update(self, roles: tuple[str, ...]) -> None:
        """reduce_and_update_fp8_tensors: all registered modules."""
        for slots in self.modules.values():
            for role in roles:
                slots[role].update()


class Chain(nn.Module):
    """Linears of which a forward runs some, with the transcription told what each really saw."""

    def __init__(self, recipe: Recipe, manager: Manager, frozen: tuple[str, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({name: nn.Linear(32, 32).bfloat16() for name in "abcd"})
        ottava.convert(self, recipe)
        for name in frozen:
            self.layers[name].requires_grad_(False)
        self.manager, self.calls = manager, 0

    def forward(self, x: Tensor, names: str) -> Tensor:
        """tanh(layer(x)) for each name."""
        self.calls += 1
        for name in names:
            layer, call = self.layers[name], self.calls
            self.check_scales(name, ROLES[:2])
            y = layer(x)
            amaxes = (x.detach().abs().max().item(), layer.weight.detach().abs().max().item())
            self.manager.forward(name, call, amaxes, y.requires_grad)
            if y.requires_grad:
                y.register_hook(lambda dy, name=name, call=call: self.see_gradient(name, call, dy))
            x = y.tanh()
        return x

    def see_gradient(self, name: str, call: int, dy: Tensor) -> None:
        """Runs just before the layer's own backward, whose cast uses the scale of this moment."""
        self.check_scales(name, ROLES[2:])
        self.manager.backward(name, call, dy.abs().max().item())

    def check_scales(self, name: str, roles: tuple[str, ...]) -> None:
        """What the next cast multiplies with."""
        for role in roles:
            slots = self.manager.modules.get(name)
            expected = slots[role].scale if slots else np.float32(1.0)
            assert door_of(self, f"layers.{name}", role).scale.item() == expected.item(), (name, role)

    def check_all(self) -> None:
        """Every scale, and every window: TE keeps the newest L - 1 in rows 1.., newest last."""
        for name, slots in self.manager.modules.items():
            self.check_scales(name, ROLES)
            for role, slot in slots.items():
                door = door_of(self, f"layers.{name}", role)
                assert door.amax_history[: slot.length - 1].tolist() == slot.history[:0:-1].tolist(), (name, role)
                assert door.staged[0].item() == slot.history[0], (name, role)


def setting(length: int, margin: int = 0, algorithm: str = "max", hybrid: bool = True) -> tuple[Recipe, Manager]:
    """The recipe and its transcription; TE's first step is unscaled."""
    changes = {"amax_history_len": length, "margin": margin, "amax_compute_algo": algorithm, "bootstrap": False}
    recipe = with_cells("delayed", **changes, **({} if hybrid else {"format": ottava.E4M3}))
    formats = ("E4M3", "E4M3", "E5M2" if hybrid else "E4M3")
    return recipe, Manager(length, margin, algorithm, formats)


@pytest.mark.parametrize("length", [1, 2, 4, 16])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 1, 3])
@pytest.mark.parametrize("fmt", [ottava.E4M3, ottava.E5M2], ids=str)
def test_the_window_is_te_s(length: int, algorithm: str, margin: int, fmt: Any) -> None:
    """100 steps of 0 to 3 casts, some of zeros, over 40 octaves and down to subnormals: scale and window, each step."""
    spec = ottava.QuantizationSpec(
        fmt, scaling="delayed", amax_history_len=length, amax_compute_algo=algorithm, margin=margin, bootstrap=False
    )
    rng, door, slot = random.Random(length), Quantizer(), Slot(length, FP8_MAX[fmt.name], margin, algorithm)
    door.prepare(spec)
    for _ in range(100):
        for _ in range(rng.randrange(4)):
            amax = np.float32(rng.choice([0.0, 1e-40, *(2.0 ** rng.uniform(-20, 20) for _ in range(8))])).item()
            cast(door, amax_of(amax), spec)
            slot.cast(amax)
        roll(door)
        slot.update()
        assert door.scale.item() == slot.scale.item()
        assert door.amax_history[: length - 1].tolist() == slot.history[:0:-1].tolist()


def test_worked_example_in_both_timings() -> None:
    """L 4, max, E4M3, amax 2, 4, 1, idle, 8: scales 1 224 112 112 112 are used; 4 * 224 and 8 * 112 saturate."""
    recipe, _ = setting(4, hybrid=False)
    table = [
        (2.0, 1, [2, 0, 0, 0], 224),
        (4.0, 224, [4, 2, 0, 0], 112),
        (1.0, 112, [1, 4, 2, 0], 112),
        (None, 112, [1, 4, 2, 0], 112),
        (8.0, 112, [8, 1, 4, 2], 56),
    ]
    for update in ("step", "autocast"):
        model = network(recipe, layers=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        door = door_of(model)
        for amax, used, window, scale in table:
            assert door.scale.item() == used
            with ottava.autocast(update=update), ottava.debug.observe(model) as seen:
                loss = loss_of(model, batch(amax)) if amax else None
            if loss is not None:
                assert (seen.table()[0]["overflow_pct"] > 0) == (amax * used > 448)
                assert (door.amax_history[0].item() == amax) == (update == "autocast")  # at the exit, not at the step
                loss.backward()
            optimizer.step()
            assert (door.amax_history.tolist(), door.scale.item()) == (window, scale)


@pytest.mark.parametrize("hybrid", [True, False], ids=["HYBRID", "E4M3"])
@pytest.mark.parametrize(
    "length, margin, algorithm", [(1, 0, "max"), (2, 1, "max"), (4, 0, "most_recent"), (16, 2, "max")]
)
def test_a_run_is_te_s(length: int, margin: int, algorithm: str, hybrid: bool) -> None:
    """25 autocasts over random modules (the others idle), of one or two forwards; some without a backward."""
    rng = random.Random(length)
    recipe, manager = setting(length, margin, algorithm, hybrid)
    model = Chain(recipe, manager)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(25):
        names = ["".join(rng.sample("abcd", rng.randint(1, 4))) for _ in range(rng.randint(1, 2))]
        manager.enter()
        with ottava.autocast(update="autocast"):
            losses = [loss_of(lambda x, n=n: model(x, n), noise(step) * 2.0 ** rng.randint(-3, 3)) for n in names]
            if inside := rng.random() < 0.2:
                torch.stack(losses).sum().backward()
        manager.exit()
        model.check_all()
        if not inside and rng.random() < 0.8:
            for loss in losses:
                loss.backward()
        model.check_all()
        optimizer.step()  # weights move, windows do not: they belong to the autocast
        model.check_all()


def test_gradients_move_where_the_first_module_has_no_backward() -> None:
    """A frozen first layer on data: TE gives the flag to the next module. Its gradient's scale must not stay at 1."""
    recipe, manager = setting(4)
    model = Chain(recipe, manager, frozen=("a",))
    for step in range(3):
        manager.enter()
        with ottava.autocast(update="autocast"):
            loss = loss_of(lambda x: model(x, "abc"), noise(step))
        manager.exit()
        loss.backward()
        model.check_all()
    assert door_of(model, "layers.b", "grad_output").amax_history.count_nonzero() == 3


def test_only_the_outermost_exit_is_a_boundary_and_only_with_gradients() -> None:
    """Inner contexts, also ones that change the recipe, end without a word; so does one that ends under no_grad."""
    recipe, _ = setting(4)
    model = network(recipe)
    with ottava.autocast(update="autocast"):
        for inner in (recipe, None, "tensorwise"):
            with ottava.autocast(inner, update="autocast"):
                model(noise(0))
        assert door_of(model).amax_history.count_nonzero() == 0
    assert door_of(model).amax_history.count_nonzero() == 1
    before = snapshot(model)
    with torch.no_grad(), ottava.autocast(update="autocast"):
        model(noise(1))
    assert differences(snapshot(model), before) == []


def test_an_exception_is_no_boundary() -> None:
    """TE updates while an exception unwinds, which with several processes is a collective that no one else enters."""
    recipe, _ = setting(4)
    model = network(recipe)
    before = snapshot(model)

    def interrupted() -> None:
        with ottava.autocast(update="autocast"):
            model(noise(0))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert differences(snapshot(model), before) == []
    with ottava.autocast(update="autocast"):
        loss = loss_of(model, noise(0))
    loss.backward()
    assert all(door.amax_history.count_nonzero() == 1 for door in doors(model).values())


def test_two_models_in_one_autocast_are_two_boundaries_of_their_own() -> None:
    """Each model's state is as if it had been alone."""
    recipe, _ = setting(4)
    alone, together = ([network(recipe, seed) for seed in (1, 2)] for _ in range(2))
    for model in alone:
        with ottava.autocast(update="autocast"):
            loss = loss_of(model, noise(0))
        loss.backward()
    with ottava.autocast(update="autocast"):
        losses = [loss_of(model, noise(0)) for model in together]
    for loss in reversed(losses):  # the flag is with the first module of the first model: its backward comes last
        loss.backward()
    for one, other in zip(alone, together, strict=True):
        assert differences(snapshot(one), snapshot(other)) == []


def test_what_this_timing_cannot_do_is_refused() -> None:
    """Recomputation would meet another scale than its forward did."""
    recipe, _ = setting(4)
    model = network(recipe)
    with ottava.autocast(update="autocast"):
        y = checkpoint(model, noise(0).requires_grad_(), use_reentrant=False)
    with pytest.raises(RuntimeError, match="Use update='step', which every recomputation agrees with"):
        y.sum().backward()
    with (
        pytest.raises(ValueError, match="unknown update 'autocst'; did you mean 'autocast'"),
        ottava.autocast(
            update="autocst"  # type: ignore[arg-type]
        ),
    ):
        pass
    assert set(BUFFERS) == set(dict(door_of(model).named_buffers()))
    assert DELAYED.bootstrap  # ours; TE's first step, which flushes gradients below 2**-16, has to be asked for
