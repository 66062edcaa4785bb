"""A weight is cast once between two changes of it, and every change is noticed: its operands are always its own.

The witness is the same run with someone watching each weight's door, which turns the cache off.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.engine import quantizer
from ottava.engine.quantizer import WeightQuantizer
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.recipe import GemmRecipe, Recipe
from scaling_samples import (
    WIDTH,
    differences,
    door_of,
    doors,
    lengths,
    loss_of,
    network,
    noise,
    same_operand,
    sgd,
    snapshot,
    train,
    windows,
    with_cells,
)

Casts = list[int]
"""Addresses of what was cast, in order."""


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> Casts:
    """Every cast that a door makes, written down on its way to the real one."""
    seen: Casts = []
    real = quantizer.cast_both

    def both(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        made = real(x, *args, **kwargs)
        operands = [o for o in (made.row, made.col) if o is not None]
        seen.extend([x.data_ptr()] * len({o.data.data_ptr() for o in operands}))  # x and x.T may share one cast
        return made

    monkeypatch.setattr(quantizer, "cast_both", both)
    monkeypatch.setattr(quantizer.Quantizer, "cast", staticmethod(both))
    return seen


def of_weights(model: nn.Module, casts: Casts) -> list[int]:
    """How often each weight was cast; the list starts anew."""
    counts = [casts.count(m.weight.data_ptr()) for m in model.modules() if isinstance(m, nn.Linear)]
    casts.clear()
    return counts


def watched(model: nn.Module) -> nn.Module:
    """The model with its cache off."""
    for name, door in doors(model).items():
        if name.endswith("weight"):
            door.register_forward_hook(lambda *_: None)
    return model


def once_each(recipe: Recipe) -> list[int]:
    """Casts of the two weights: w and w.T may share their codes; w.T of the first layer, whose dx is not asked for, is
    never made."""
    specs = [spec for spec in (recipe.fprop.rhs, recipe.dgrad.rhs) if spec is not None]
    shared = len(specs) == 2 and specs[0] == specs[1] and specs[0].granularity.transposes
    return [int(recipe.fprop.rhs is not None), 1 if shared else len(specs)]


# --- how often ------------------------------------------------------------------------------------------------------


def test_one_cast_per_step_over_micro_batches(recipe: Recipe, casts: Casts) -> None:
    """Four micro-batches a step with every recipe; evaluation among them costs nothing either."""
    model = network(recipe)
    optimizer, once = sgd(model), once_each(recipe)
    if not all(spec is None or spec.repeatable for spec in recipe.cells("weight")):
        once = [8, 12]  # a rotation is drawn anew: 4 trainings and 4 evaluations, and 4 times w.T
    for step in range(3):
        for i in range(4):
            loss_of(model, noise(10 * step + i)).backward()
            with torch.no_grad():
                model(noise(99))
        optimizer.step()
        assert of_weights(model, casts) == once


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_finds_the_cast_done(reentrant: bool, casts: Casts) -> None:
    """Forward twice, backward once, cast once. Reentrant, the first forward is one without gradients, which leaves no
    trace, so that a history sees only the second; with current scales it is one cast."""
    for recipe in ("delayed", "tensorwise"):
        model = network(recipe)
        optimizer = sgd(model)
        for step in range(3):
            y = checkpoint(model, noise(step).requires_grad_(), use_reentrant=reentrant)
            y.float().square().mean().backward()
            assert of_weights(model, casts) == [2 if reentrant and recipe == "delayed" else 1] * 2
            optimizer.step()
        assert lengths(model) == ([3] * 6 if recipe == "delayed" else [])


def test_evaluation_between_steps_casts_for_itself_only_where_a_history_must_see_the_weight(casts: Casts) -> None:
    """After a step the first cast is evaluation's; delayed scaling casts again for its window, current scaling not."""
    for recipe, expected in (("tensorwise", 1), ("delayed", 2)):
        model = network(recipe)
        train(model, [0])
        casts.clear()
        with torch.no_grad():
            model(noise(9))
        train(model, [1])
        assert of_weights(model, casts) == [expected] * 2
    assert [len(w) for w in windows(model, "weight")] == [2, 2]


def test_a_step_that_moves_no_weight_costs_no_cast(casts: Casts) -> None:
    """An optimizer skips parameters without a gradient; on a CPU a checksum says that their casts are still good."""
    spec = ottava.RECIPES["tensorwise"].fprop.rhs
    door, weight = WeightQuantizer(), nn.Parameter(noise(0))
    for _ in range(3):
        door(weight, spec, spec)
        door.stepped()
    assert casts == [weight.data_ptr()]


def test_frozen_weights_of_current_scaling_are_cast_once_for_good(casts: Casts) -> None:
    """Their bits never change, and nothing waits for their amax."""
    model = network("tensorwise").requires_grad_(False)
    model[2].bias.requires_grad_(True)
    train(model, range(5))
    assert of_weights(model, casts) == [1, 1]


# --- the same bits --------------------------------------------------------------------------------------------------


def test_training_with_the_cache_has_the_bits_of_training_without(recipe: Recipe) -> None:
    """Micro-batches, an evaluation and a step by hand through .data, three rounds."""
    results = []
    for model in (network(recipe), watched(network(recipe))):
        optimizer = sgd(model)
        torch.manual_seed(1)  # nvfp4 rounds gradients stochastically
        for step in range(3):
            for i in range(2):
                loss_of(model, noise(10 * step + i)).backward()
            with torch.no_grad():
                y = model(noise(99))
            optimizer.step()
            for p in model.parameters():
                p.data.mul_(1.01)
        results.append({**snapshot(model), "y": y})
    assert differences(*results) == []


def flip_rows(w: nn.Parameter) -> None:
    w.data.copy_(w.data.flip(0))


def swap_two_words(w: nn.Parameter) -> None:
    w.data[0, :4], w.data[1, :4] = w.data[1, :4].clone(), w.data[0, :4].clone()


def negate(w: nn.Parameter) -> None:
    w.data.neg_()


def one_ulp(w: nn.Parameter) -> None:
    w.data.view(torch.int16)[-1, -1] += 1 << 5  # of E4M3, whose 3 bits of mantissa are the upper ones of BF16's 7


def new_storage(w: nn.Parameter) -> None:
    w.data = torch.randn(w.shape, generator=torch.Generator().manual_seed(7)).to(w.dtype)


def in_place(w: nn.Parameter) -> None:
    with torch.no_grad():
        w.mul_(3)


def through_numpy(w: nn.Parameter) -> None:
    w.data.view(torch.int16).numpy()[0, 0] ^= 0x40


CHANGES = (flip_rows, swap_two_words, negate, one_ulp, new_storage, in_place, through_numpy)


def fixed_operand(recipe: str) -> QuantizationSpec:
    spec = ottava.get_recipe(recipe).fprop.rhs
    assert spec is not None
    return spec


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "delayed"])
def test_every_change_of_a_weight_is_noticed(change: Callable[[nn.Parameter], None], recipe: str) -> None:
    """Whichever way it is written: the next operand is the cast of what is there now. A sum would miss permutations."""
    torch.manual_seed(0)
    weight, spec = nn.Parameter(torch.randn(WIDTH, 64).bfloat16()), fixed_operand(recipe)
    weight.data[::2] = -weight.data[1::2]  # so that sums over all words, and over all signs, are blind
    door = WeightQuantizer()
    if spec.predicted:
        door.prepare(spec)
    before, _ = door(weight, spec, spec)
    again, _ = door(weight, spec, spec)
    assert again is before
    change(weight)
    after, after_t = door(weight, spec, spec)
    assert same_operand(after, ottava.quantize(weight.detach(), spec))
    assert same_operand(after_t, ottava.quantize(weight.detach().t(), spec))
    assert not same_operand(after, before)


def test_looking_at_a_weight_leaves_its_storage_resizable() -> None:
    """FSDP2 frees an unsharded weight by resizing its storage, which tensor.numpy() would forbid for good."""
    weight, spec = torch.randn(WIDTH, WIDTH).bfloat16(), fixed_operand("tensorwise")
    WeightQuantizer()(weight, spec, spec)
    weight.untyped_storage().resize_(0)
    empty, _ = WeightQuantizer()(torch.zeros(0, WIDTH), spec, spec)
    assert tuple(empty.shape) == (0, WIDTH)


def test_a_new_scale_is_a_new_cast() -> None:
    """The weight is frozen; what changes is the scale: by a boundary, a loaded checkpoint, a reset."""
    spec, door = with_cells("delayed", amax_history_len=2).fprop.rhs, network().get_submodule("0.quantizers.weight")
    assert spec is not None
    assert isinstance(door, WeightQuantizer)
    weight = torch.full((4, 8), 2.0).bfloat16()

    def scale_used() -> float:
        row, _ = door(weight, spec, spec, record=False)
        assert isinstance(row, QuantizedTensor)
        return 1 / row.scale_inv.item()

    door.drop()
    door(weight, spec, spec)
    door.scale.fill_(16.0)
    assert scale_used() == 16
    state = {**door.state_dict(), "amax_history": torch.tensor([7.0, 0.0])}
    door.load_state_dict(state)
    assert scale_used() == 64
    door.reset()
    assert scale_used() == pytest.approx(224)
    assert door.spec == spec


# --- where it stays out of the way ----------------------------------------------------------------------------------


def test_watched_doors_cast_every_time(casts: Casts) -> None:
    """Observation sees each cast as it is made; afterwards the cache is back."""
    model = network("tensorwise")
    with ottava.debug.observe(model) as seen:
        for _ in range(3):
            model(noise(0))
    assert of_weights(model, casts) == [3, 3]
    assert len(seen.table()) == 4
    for _ in range(3):
        model(noise(0))
    assert of_weights(model, casts) == [1, 1]


def test_stochastic_rounding_is_never_reused(casts: Casts) -> None:
    """Each cast is another draw."""
    spec = replace(fixed_operand("tensorwise"), rounding="stochastic")
    recipe = replace(ottava.get_recipe("tensorwise"), fprop=GemmRecipe(fixed_operand("tensorwise"), spec))
    model = network(recipe)
    ys = [model(noise(0)).detach() for _ in range(2)]
    assert not torch.equal(*ys)
    assert of_weights(model, casts) == [2, 4]  # their specs differ, and the first layer needs no w.T


def test_weights_that_stay_in_high_precision_are_not_kept() -> None:
    """An operand that is the weight itself would keep it alive, and autograd's version check already guards it."""
    model = network("rowwise_with_gw_hp")
    recipe = ottava.RECIPES["tensorwise"].override("*", dgrad=None)
    with ottava.autocast(recipe):
        loss_of(model, noise(0)).backward()
    assert [getattr(door_of(model, i, "weight"), "cached") for i in (0, 2)] == [None, None]  # noqa: B009


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_and_pickles_leave_the_cache_behind(copied: Callable[[nn.Module], nn.Module]) -> None:
    """A copy casts its own weight; a pickle is not larger for it."""
    model = network("tensorwise")
    empty = len(pickle.dumps(model))
    model(noise(0))
    twin = copied(model)
    assert len(pickle.dumps(model)) < empty + 64
    door, twins = (door_of(m, 0, "weight") for m in (model, twin))
    assert isinstance(door, WeightQuantizer)
    assert isinstance(twins, WeightQuantizer)
    assert door.cached is not None
    assert twins.cached is None


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8", "nvfp4"])
def test_kept_casts_leave_amaxes_of_blocks_behind(recipe: str) -> None:
    """They are for those who watch a cast when it is made, and take a ninth of what an MXFP8 weight does."""
    model = network(recipe)
    loss_of(model, noise(0)).backward()
    door = door_of(model, 2, "weight")
    assert isinstance(door, WeightQuantizer)
    assert door.cached is not None
    kept = [operand.amax for operand in door.cached[2:] if isinstance(operand, QuantizedTensor)]
    assert kept
    assert not any(amax is not None and amax.numel() > 1 for amax in kept)


def test_predicted_weights_hold_no_memory_between_steps() -> None:
    """The boundary lets go of the codes, whose scale is out of date."""
    model = network()
    door = door_of(model, 0, "weight")
    assert isinstance(door, WeightQuantizer)
    loss_of(model, noise(0)).backward()
    assert door.cached is not None
    sgd(model).step()
    assert door.cached is None


def test_weights_made_in_inference_mode_have_no_version() -> None:
    """Loading and running a model in inference mode must not ask for it; the checksum notices changes."""
    with torch.inference_mode():
        model = network("tensorwise")
        one = model(noise(0))
        model[0].weight.mul_(2)
        two = model(noise(0))
        assert not torch.equal(one, two)
        assert torch.equal(two, watched(model)(noise(0)))


# --- on an accelerator, where nothing is read back --------------------------------------------------------------------


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules of an accelerator on the tensors of a CPU; optimizer steps are looked at, as a CUDA weight asks."""
    monkeypatch.setattr(quantizer, "_on_accelerator", lambda x: x.device.type != "meta")


def listening(recipe: Recipe | str) -> nn.Module:
    model = network(recipe)
    ottava.ScalingState(model).listen(moves=ottava.get_recipe(recipe).name == "delayed")
    return model


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_there_a_weight_is_cast_once_a_step_from_the_second_on(recipe: str, casts: Casts) -> None:
    """The first step learns that there are several micro-batches; evaluation casts for itself and is not used."""
    model = listening(recipe)
    optimizer, counts = sgd(model), []
    for step in range(3):
        for i in range(4):
            loss_of(model, noise(10 * step + i)).backward()
        counts.append(of_weights(model, casts)[1])
        with torch.no_grad():
            model(noise(99))
        counts.append(of_weights(model, casts)[1])
        optimizer.step()
    assert counts == [4, 1, 1, 1, 1, 1]


@pytest.mark.usefixtures("accelerator")
def test_there_the_bits_stay_those_without_a_cache(recipe: Recipe) -> None:
    """Micro-batches, an evaluation with averaged weights swapped in through .data, and .data writes after a step."""
    results = []
    for model in (listening(recipe), watched(listening(recipe))):
        optimizer = sgd(model)
        torch.manual_seed(1)
        for step in range(4):
            for i in range(2):
                loss_of(model, noise(10 * step + i)).backward()
                kept = [p.detach().clone() for p in model.parameters()]
                for p in model.parameters():
                    p.data.mul_(0.5)
                with torch.no_grad():
                    y = model(noise(99))
                for p, old in zip(model.parameters(), kept, strict=True):
                    p.data.copy_(old)
            optimizer.step()
            for p in model.parameters():
                p.data.mul_(1.01)
        results.append({**snapshot(model), "y": y})
    assert differences(*results) == []


class ByData(torch.optim.SGD):
    """An optimizer that writes weights through .data, which no version tells of: fused ones of other packages do."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.data.sub_(p.grad, alpha=0.5)


@pytest.mark.usefixtures("accelerator")
def test_there_a_step_is_believed_and_not_its_traces() -> None:
    """Neither version nor address of the weight change: the optimizer's step itself is what ends a kept cast."""
    results = []
    for model in (listening("tensorwise"), watched(listening("tensorwise"))):
        optimizer = ByData(model.parameters(), lr=0.5)
        for step in range(3):
            for i in range(2):
                loss_of(model, noise(2 * step + i)).backward()
            optimizer.step()
        results.append(snapshot(model))
    assert differences(*results) == []


@pytest.mark.usefixtures("accelerator")
def test_there_a_loop_without_a_torch_optimizer_is_never_believed(casts: Casts) -> None:
    """Nobody says when the weights change: every forward casts."""
    model = listening("tensorwise")
    for step in range(4):
        loss_of(model, noise(step)).backward()
        for p in model.parameters():
            p.data.sub_(p.grad, alpha=0.05)
    assert of_weights(model, casts) == [4, 4]


@pytest.mark.usefixtures("accelerator")
def test_there_one_forward_a_step_keeps_nothing(casts: Casts) -> None:
    """Codes of all weights are memory; recomputation makes it two forwards and is worth it."""
    model = listening("tensorwise")
    optimizer = sgd(model)
    for step in range(3):
        loss_of(model, noise(step)).backward()
        assert getattr(door_of(model, 2, "weight"), "cached") is None  # noqa: B009
        optimizer.step()
    casts.clear()
    for step in range(3):
        checkpoint(model, noise(step), use_reentrant=False).float().square().mean().backward()
        optimizer.step()
    assert of_weights(model, casts)[1] == 2 + 1 + 1


@pytest.mark.usefixtures("accelerator")
def test_there_writes_and_updates_are_noticed(casts: Casts) -> None:
    """In place: by the version. Through .data in the middle of a step: only when `update` is called."""
    model = listening("tensorwise")
    optimizer = sgd(model)
    for step in range(2):
        for i in range(2):
            loss_of(model, noise(2 * step + i)).backward()
        optimizer.step()
    casts.clear()
    with torch.no_grad():
        for change in ("first", "none", "in place", "data and update"):
            if change == "in place":
                model[2].weight.mul_(2)
            if change == "data and update":
                model[2].weight.data.mul_(2)
                ottava.ScalingState(model).update()
            with torch.enable_grad():
                model(noise(0))
            assert of_weights(model, casts)[1] == (0 if change == "none" else 1), change


@pytest.mark.usefixtures("accelerator")
def test_there_a_strange_graph_ends_it(casts: Casts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step runs again without Python: a cast may neither be frozen in nor be kept beside its replays."""
    model = listening("tensorwise")
    optimizer, counts = sgd(model), []
    for step in range(4):
        monkeypatch.setattr(quantizer, "_capturing", lambda x, step=step: step == 2)
        for i in range(2):
            loss_of(model, noise(2 * step + i)).backward()
        counts.append(of_weights(model, casts)[1])
        optimizer.step()
    assert counts == [2, 1, 2, 2]
