"""Faults in loops of other shapes, and runs without one (set G); written without knowledge of the
diagnosis, see run.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from classic import case, clean, later
from loops_models import SEPARATOR, preferred  # registers its models, too
from models import Lab
from shapes import with_scaled_input
from torch import Tensor

import ottava
from ottava.engine.quantizer import Quantizer
from ottava.recipe import get_recipe


class Both:
    """Two optimizers that step together."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def two_optimizers(lab: Lab, one: Callable[[str], bool], other: Callable[[str], bool]) -> None:
    """Each has the parameters whose names it wants."""

    def make(parameters: Any, lr: float) -> Both:
        named = list(lab.model.named_parameters())
        return Both(*(torch.optim.Adam([p for name, p in named if wants(name)], lr=lr) for wants in (one, other)))

    lab.make_optimizer = make


def with_rate(lab: Lab, rate: Callable[[int], float]) -> None:
    """A schedule."""
    lab.before_step.append(lambda: [g.update(lr=rate(lab.step)) for g in lab.optimizer.param_groups] and None)


# --- FP8 is to blame -------------------------------------------------------------------------------------------------
@case("G", "recompute", "frozen gradient start", "", recipe="delayed", steps=20)
def scales_of_gradients_stay_at_one(lab: Lab) -> None:
    """Recomputation outside of the context: the scales of gradients never leave 1; the loss is a share of a mean."""
    lab.change_loss = lambda loss: loss / 256

    def reset() -> None:
        for name, door in lab.model.named_modules():
            if isinstance(door, Quantizer) and name.endswith("grad_output"):
                door.scale.fill_(1.0)

    lab.before_step.append(reset)


@case("G", "packed", "channel noisy", "blocks", recipe="nvfp4", steps=24)
def one_loud_channel_in_sixteen(lab: Lab) -> None:
    """Channels that FP8 would bear, and that leave nothing of their neighbours in 4 bits."""
    with torch.no_grad():
        for i in range(3):
            block = lab.layer(f"blocks.{i}")
            for norm, layer in ((block.norm1, block.qkv), (block.norm2, block.up)):
                norm.weight[5::16] *= 100.0
                layer.weight[:, 5::16] /= 100.0


@case("G", "packed", "token row outlier", "blocks")
def separators_shout(lab: Lab) -> None:
    """No token attends to a separator, and its own label is ignored; it is five thousand times as loud."""
    rows: list[Tensor] = []
    lab.model.register_forward_pre_hook(lambda _, args: rows.__setitem__(slice(None), [args[0] == SEPARATOR]))
    for i in range(3):
        for name in ("qkv", "up"):
            lab.change_input(f"blocks.{i}.{name}", lambda x: x * (1 + 5e3 * rows[0][..., None].to(x.dtype)))


@case("G", "vae", "old_spike two_sites clip jump", "", recipe="delayed", steps=20)
def evaluation_moves_the_scales(lab: Lab) -> None:
    """An evaluation in training mode, with gradients, on numbers that nobody normalized, between the steps."""

    def evaluate() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            lab.model(2e5 * torch.randn(16, 64, generator=lab.generator(lab.step)))

    lab.before_step.append(evaluate)


@case("G", "recompute", "growth clip jump", "down", recipe="delayed", every=1)
def inputs_grow_eightfold_each_step(lab: Lab) -> None:
    """A factor that the model divides out again; the predicted scale is a step behind."""
    for i in range(3):
        with_scaled_input(lab, f"blocks.{i}.down", lambda: 8.0**lab.step)


@case("G", "actor", "margin_low", "", recipe="delayed")
def negative_margin_for_gradients(lab: Lab) -> None:
    two_optimizers(lab, lambda name: "value" not in name, lambda name: "value" in name)
    recipe = get_recipe("delayed")
    spec = recipe.dgrad.lhs
    assert spec is not None
    lab.recipe = recipe.override("*", cells=dict.fromkeys(("dgrad.lhs", "wgrad.lhs"), replace(spec, margin=-8)))


@case("G", "sets", "clip jump", "whole", recipe=get_recipe("delayed", amax_history_len=1), every=1)
def short_and_long_in_turn(lab: Lab) -> None:
    """Sums over two members, then over sixty-four, under a history of one step."""
    lab.change_batch = lambda b: [b[0][:, :1] if lab.step % 2 else b[0], b[1]]


@case("G", "ema", "old_spike frozen", "", recipe=get_recipe("delayed", amax_history_len=1024), steps=24, with_twin=True)
def histories_of_the_rate_finder(lab: Lab) -> None:
    """A search for the learning rate ends loudly; weights are restored, and histories are not."""
    with_rate(lab, lambda step: 10.0 ** (step - 2) if step <= 6 else 3e-3)
    kept: dict[str, Tensor] = {}

    def restore() -> None:
        for name, parameter in lab.model.named_parameters():
            parameter.data.copy_(kept[name])
        lab.optimizer.state.clear()

    later(lab, 1, lambda: kept.update({name: p.detach().clone() for name, p in lab.model.named_parameters()}))
    later(lab, 7, restore)


@case("G", "graph", "row outlier channel", "", recipe="tensorwise")
def merged_adapter_overflows(lab: Lab) -> None:
    """An adapter that was merged with a wrong factor into units that nobody reads: the other rows are gone."""
    with torch.no_grad():
        for i in range(3):
            for layers in (lab.model.own, lab.model.others):
                layers[i].weight[60:] = 1e6 * torch.randn(4, 64, generator=lab.generator(i))
                layers[i].register_forward_hook(lambda _, __, y: y * (torch.arange(64) < 60).to(y.dtype))


def mean_of(history: Tensor) -> Tensor:
    """An own rule for the amax: the mean, also over the entries that no step has written yet."""
    return history.mean(0)


@case(
    "G",
    "packed",
    "margin_low clip jump start",
    "",
    recipe=get_recipe("delayed", amax_history_len=256, amax_compute_algo=mean_of),
)
def mean_over_an_empty_history(lab: Lab) -> None:
    """A history of 256 entries of which a few are written: each predicted amax is far too low."""


@case("G", "packed", "margin_high", "", recipe=get_recipe("guarded", margin=16), steps=20)
def guard_and_margin(lab: Lab) -> None:
    """Somebody copied a margin for loss scales, in units of bits, into the recipe."""


# --- FP8 is not to blame ---------------------------------------------------------------------------------------------
@case("G", "dpo", "constant_loss no_gradient vanish", "", fp8=False, steps=14)
def beta_of_zero(lab: Lab) -> None:
    """The loss stays at the logarithm of two."""
    lab.loss_of = partial(preferred, 0.0)


@case("G", "dpo", "lr twin", "", fp8=False, with_twin=True, lr=0.3, steps=14)
def preferences_at_a_rate_of_pretraining(lab: Lab) -> None:
    """A rate a hundred times too high for any tuning."""


@case("G", "actor", "no_optimizer", "value", fp8=False)
def critic_without_its_optimizer(lab: Lab) -> None:
    """The second optimizer was given the policy again."""
    two_optimizers(lab, lambda name: "trunk" in name, lambda name: "policy" in name)


@case("G", "actor", "double_step", "", fp8=False)
def both_optimizers_own_the_trunk(lab: Lab) -> None:
    two_optimizers(lab, lambda name: "value" not in name, lambda name: "policy" not in name)


@case("G", "recompute", "no_gradient frozen_parameters no_optimizer", "blocks", fp8=False, recipe="rowwise")
def reentrant_recomputation_of_frozen_inputs(lab: Lab) -> None:
    """The embeddings are frozen, so the first block's input wants no gradient, and no block gets one."""
    lab.model.reentrant = True
    lab.model.embed.requires_grad_(False)
    lab.model.position.requires_grad_(False)


@case("G", "vae", "nonfinite_compute", "", fp8=False, recipe="mxfp8")
def variance_overflows(lab: Lab) -> None:
    """The logarithm of a variance is not bounded, and its exponential is no number any more."""

    def push() -> None:
        lab.layer("spread").bias.data.fill_(600.0)

    later(lab, 9, push)


@case("G", "graph", "lr", "", fp8=False, steps=24)
def rate_finder_was_left_on(lab: Lab) -> None:
    with_rate(lab, lambda step: 1e-5 * 2.0**step)


@case("G", "graph", "twin start", "", fp8=False, with_twin=True, recipe="rowwise")
def degrees_are_not_divided_out(lab: Lab) -> None:
    """Sums over neighbours in three layers and over nodes: the first logits are in the thousands, in BF16 too."""
    lab.model.mean = False
    for i in range(3):
        lab.layer(f"others.{i}").weight.data.mul_(4)


@case("G", "ema", "frozen_parameters no_gradient no_optimizer", "student", fp8=False, steps=20)
def student_stays_frozen_after_an_evaluation(lab: Lab) -> None:
    """requires_grad_(False) for a measurement at step 8; only the head was thawed."""
    later(lab, 8, lambda: lab.layer("student").requires_grad_(False) and None)


@case("G", "ema", "blank", "", fp8=False)
def both_views_are_blank(lab: Lab) -> None:
    """The augmentation crops outside of the image: all inputs are 0."""
    lab.change_batch = lambda b: [torch.zeros_like(b[0]), torch.zeros_like(b[1]), b[2]]


@case("G", "sets", "absurd_data", "", fp8=False)
def missing_values_are_minus_9999(lab: Lab) -> None:
    """The mark of a missing value goes into the model as a number."""

    def change(batch: list[Tensor]) -> list[Tensor]:
        missing = torch.rand(batch[0].shape, generator=lab.generator(lab.step)) < 0.03
        return [batch[0].masked_fill(missing, -9999.0), batch[1]]

    lab.change_batch = change


@case("G", "actor", "dead_units lr", "", fp8=False, steps=20)
def one_step_of_a_glitch(lab: Lab) -> None:
    """The schedule nearly divides by zero once: neither the loss nor a quarter of the ReLUs recovers."""
    with_rate(lab, lambda step: 2.0 if step == 4 else 3e-3)


@case("G", "packed", "unconverted eval_recipe", "blocks.1", fp8=False)
def high_precision_left_on(lab: Lab) -> None:
    """Somebody debugged one block in high precision and left the switch there."""
    block = lab.layer("blocks.1")
    block.forward = ottava.autocast(enabled=False)(block.forward)


@case("G", "packed", "labels constant_loss", "", fp8=False, steps=20)
def labels_of_another_shard(lab: Lab) -> None:
    """Inputs and labels come from two files of which one has lost a line: nothing belongs together."""
    lab.change_batch = lambda b: [b[0], b[1].flip(0).roll(5, 1)]


# --- clean runs ------------------------------------------------------------------------------------------------------
def _two(lab: Lab) -> None:
    two_optimizers(lab, lambda name: "value" not in name, lambda name: "value" in name)


def _longer(lab: Lab) -> None:
    lab.change_batch = lambda b: [x[:, : 8 + 4 * (lab.step // 3)] for x in b]


def _by_autocast(lab: Lab) -> None:
    def convert(model: Any, recipe: Any) -> None:
        ottava.convert(model, "bf16")
        model.forward = ottava.autocast(recipe)(model.forward)

    lab.convert = convert


def _stored(lab: Lab) -> None:
    lab.convert = lambda model, recipe: ottava.convert(model, recipe, weights="fp8", keep_high_precision=True)
    lab.make_optimizer = lambda parameters, lr: ottava.optim.AdamW(parameters, lr=lr, master="fp32")


def _resumes(lab: Lab) -> None:
    def resume() -> None:
        model, optimizer = copy.deepcopy(lab.model.state_dict()), copy.deepcopy(lab.optimizer.state_dict())
        lab.model.load_state_dict(model)
        lab.optimizer.load_state_dict(optimizer)

    later(lab, 9, resume)


for _kind, _recipe, _label, _inject, _options in (
    ("actor", "delayed", "two optimizers", _two, {}),
    ("recompute", "delayed", "recomputation", None, {}),
    ("packed", "tensorwise", "longer sequences step by step", _longer, {"steps": 18}),
    ("dpo", "rowwise", "a frozen reference", None, {"steps": 14, "lr": 1e-3}),
    ("ema", "tensorwise", "a teacher without gradients", None, {}),
    ("vae", "mxfp8", "noise in the middle", None, {"steps": 20}),
    ("graph", "tensorwise", "by autocast alone", _by_autocast, {}),
    ("sets", "tensorwise", "stored weights with a master copy", _stored, {}),
    ("packed", "delayed", "resumed at step 9", _resumes, {"accumulate": 2}),
):
    clean("G", _kind, _recipe, _label, inject=_inject, **_options)
