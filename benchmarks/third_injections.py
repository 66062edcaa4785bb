"""Halves C and D of the second lab's faults, written before any of them was run; see second_faults.py, docs/LOG.md."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import third_lab  # registers its models
import torch
from second_injections import case, clean, later
from second_lab import Lab
from torch import Tensor

import ottava
from ottava.quantizer import Quantizer
from ottava.recipe import get_recipe


# --- half C: numbers and scales ------------------------------------------------------------------------------------
@case("C", "dit", "growth", "blocks.1", steps=24)
def modulation_runs_away(lab: Lab) -> None:
    def grow() -> None:
        with torch.no_grad():
            lab.layer("blocks.1.modulation").weight[48:96].mul_(1.6)
            lab.layer("blocks.1.modulation").bias[48:96].add_(0.02).mul_(1.6)

    lab.before_step.append(grow)


@case("C", "torch", "token row outlier", "layers.1.linear2")
def another_massive_token_each_step(lab: Lab) -> None:
    def change(x: Tensor) -> Tensor:
        scale = torch.ones(x.shape[1], 1, dtype=x.dtype)
        scale[(5 * lab.step) % 16] = 7e4
        return x * scale

    lab.change_input("encoder.layers.1.linear2", change)


@case("C", "dlrm", "absurd_data", "", fp8=False)  # at the first look "channel": its layer is too narrow to be cast
def raw_timestamp(lab: Lab) -> None:
    def change(batch: list[Tensor]) -> list[Tensor]:
        dense = batch[0].clone()
        dense[:, 6] = 1.7e5 + 3e4 * dense[:, 6]
        return [dense, *batch[1:]]

    lab.change_batch = change


@case("C", "dit", "clip jump", "", recipe=get_recipe("delayed", amax_history_len=1), every=1)
def two_domains_in_turn(lab: Lab) -> None:
    lab.change_batch = lambda b: [b[0] * (40.0 if lab.step % 3 == 0 else 1.0), *b[1:]]


@case("C", "ssm", "gradient channel", "blocks.2", recipe="rowwise")
def channels_of_a_gradient(lab: Lab) -> None:
    sizes = torch.exp(9 * torch.randn(192, generator=lab.generator()))
    lab.change_gradient("blocks.2.in_proj", lambda g: g * sizes.to(g.dtype))


@case("C", "lora", "row outlier token channel", "blocks.0.mlp.fc1")
def flipped_bit(lab: Lab) -> None:
    lab.layer("blocks.0.mlp.fc1.base").weight.data[5, 11] = 2.0**17


@case("C", "clip", "old_spike frozen", "", recipe=get_recipe("delayed", amax_history_len=64), steps=20)
def history_of_another_model(lab: Lab) -> None:
    def load() -> None:
        for door in lab.model.modules():
            if isinstance(door, Quantizer) and door.spec is not None:
                door.amax_history.fill_(3e4)
                door.scale.div_(2.0**16)

    later(lab, 6, load)


@case("C", "ssm", "margin_high", "", recipe="delayed")
def margin_for_gradients_only(lab: Lab) -> None:
    recipe = get_recipe("delayed")
    wide = {
        cell: replace(spec, margin=20)
        for cell, spec in (("dgrad.lhs", recipe.dgrad.lhs), ("wgrad.lhs", recipe.wgrad.lhs))
        if spec is not None
    }
    lab.recipe = recipe.override("*", cells=wide)


@case("C", "torch", "boundary row outlier token channel", "head")
def wide_head(lab: Lab) -> None:
    with torch.no_grad():
        lab.layer("head").weight.mul_(torch.exp(5 * torch.randn(64, 1, generator=lab.generator())))
    lab.convert = lambda model, recipe: ottava.convert(model, recipe, filter=lambda name, layer: True)


# --- data ------------------------------------------------------------------------------------------------------------
@case("C", "clip", "same_batch", "", fp8=False, steps=20)
def two_batches_for_ever(lab: Lab) -> None:
    kept: list[Any] = []

    def change(batch: list[Tensor]) -> list[Tensor]:
        if len(kept) < 2:
            kept.append(batch)
        return kept[lab.step % len(kept)]

    lab.change_batch = change


@case("C", "torch", "leak", "", fp8=False, steps=24)
def labels_are_the_inputs(lab: Lab) -> None:
    lab.change_batch = lambda b: [b[0], b[0].clone()]


@case("C", "torch", "labels", "", fp8=False)
def one_label_for_all(lab: Lab) -> None:
    lab.change_batch = lambda b: [b[0], torch.zeros_like(b[1])]


@case("C", "dit", "absurd_data", "", fp8=False)
def bytes_not_normalized(lab: Lab) -> None:
    lab.change_batch = lambda b: [127.5 + 60 * b[0], *b[1:]]


@case("C", "dit", "nonfinite_data", "", fp8=False, recipe="delayed")
def nan_in_a_target(lab: Lab) -> None:
    def change(batch: list[Tensor]) -> list[Tensor]:
        target = batch[-1].clone()
        if lab.step == 8:
            target[1, 2, 3] = math.nan
        return [*batch[:-1], target]

    lab.change_batch = change


@case("C", "dlrm", "blank", "", fp8=False)
def blank_batches(lab: Lab) -> None:
    lab.change_batch = lambda b: [b[0] * (0.0 if lab.step >= 6 else 1.0), *b[1:]]


@case("C", "dlrm", "twin absurd_data", "", fp8=False, with_twin=True, steps=20)
def bad_batch_in_both(lab: Lab) -> None:
    lab.change_batch = lambda b: [b[0] * (3e3 if lab.step == 11 else 1.0), *b[1:]]


# --- training --------------------------------------------------------------------------------------------------------
@case("C", "ssm", "lr_zero vanish", "", fp8=False)
def schedule_ends_early(lab: Lab) -> None:
    lab.before_step.append(
        lambda: [group.update(lr=3e-3 * max(0.0, 1 - lab.step / 4)) for group in lab.optimizer.param_groups] and None
    )


@case("C", "torch", "weight_decay", "", fp8=False, steps=20)
def weight_decay_of_fifty(lab: Lab) -> None:
    lab.make_optimizer = lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, weight_decay=50.0)


@case("C", "torch", "frozen_parameters no_optimizer", "layers.1", fp8=False)
def one_block_frozen(lab: Lab) -> None:
    lab.layer("encoder.layers.1").requires_grad_(False)


@case("C", "clip", "no_gradient no_optimizer", "image", fp8=False)
def tower_without_gradient(lab: Lab) -> None:
    lab.layer("image").register_forward_hook(lambda _, __, y: y.detach())


@case("C", "dit", "dead_units", "blocks.1.mlp", fp8=False)
def gain_of_zero(lab: Lab) -> None:
    lab.change_input("blocks.1.mlp.fc1", lambda x: x * 0)
    lab.layer("blocks.1.mlp.fc1").bias.data.zero_()


@case("C", "dit", "lr", "blocks.1", fp8=False, steps=20)
def one_group_too_fast(lab: Lab) -> None:
    def optimizer(parameters: Any, lr: float) -> Any:
        fast = set(map(id, lab.layer("blocks.1").parameters()))
        groups: list[Any] = [{"params": [p for p in lab.model.parameters() if id(p) not in fast]}]
        return torch.optim.AdamW([*groups, {"params": [*lab.layer("blocks.1").parameters()], "lr": 1.0}], lr=lr)

    lab.make_optimizer = optimizer


@case("C", "torch", "start", "", fp8=False)
def head_too_large(lab: Lab) -> None:
    lab.layer("head").weight.data.mul_(40)


@case("C", "raw", "unconverted", "mlp", fp8=False)
def products_outside_of_layers(lab: Lab) -> None:
    pass


# --- what is not finite -----------------------------------------------------------------------------------------------
@case("C", "ssm", "nonfinite_compute", "blocks.1", fp8=False)
def state_explodes(lab: Lab) -> None:
    lab.change_input(
        "blocks.1.out_proj", lambda x: x * torch.exp(torch.tensor(12.0 * max(0, lab.step - 2))).to(x.dtype)
    )


def _masked_whole(lab: Lab) -> None:
    """At the first look a fault; but torch's attention gives 0 for a sample without a key, so it is clean."""

    def change(batch: list[Tensor]) -> list[Tensor]:
        padding = torch.zeros(batch[0].shape)
        if lab.step >= 6:
            padding[2] = -math.inf
        return [batch[0], padding, batch[1]]

    lab.change_batch = change


@case("C", "clip", "nonfinite_compute", "image", fp8=False)
def root_of_zero(lab: Lab) -> None:
    def change(x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide if lab.step < 7 else wide - wide.detach()
        return wide / (1e-6 + wide.square().sum(-1, keepdim=True).sqrt())

    lab.change_input("image.4", change)


# --- clean ---------------------------------------------------------------------------------------------------------
def _noam(lab: Lab) -> None:
    lab.before_step.append(
        lambda: (
            [g.update(lr=3e-2 * min(lab.step**-0.5, lab.step * 6**-1.5)) for g in lab.optimizer.param_groups] and None
        )
    )


def _average(lab: Lab) -> None:
    def average() -> None:
        for own, other in zip(kept.parameters(), lab.model.parameters(), strict=True):
            own.data.lerp_(other.data, 0.1)

    kept = third_lab.Diffusion()
    lab.after_step.append(average)


def _freezes(lab: Lab) -> None:
    for p in lab.model.embed.parameters():
        p.requires_grad_(False)
    lab.make_optimizer = lambda parameters, lr: torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=lr)


for _kind, _recipe, _options in (
    ("dit", "tensorwise", {"inject": _average}),
    ("dit", "delayed", {"steps": 24}),
    ("ssm", "blockwise", {"inject": _noam}),
    ("clip", "delayed", {}),
    ("dlrm", "rowwise", {}),
    ("lora", "tensorwise", {}),
    ("torch", "mxfp8", {"inject": _freezes}),
    ("torch", "guarded", {"accumulate": 2, "clip": 1.0}),
    ("ssm", "tensorwise", {"bf16": True, "every": 1}),
    ("torch", "delayed", {"label": "sample masked whole", "inject": _masked_whole}),
):
    clean("C", _kind, _recipe, **_options)
