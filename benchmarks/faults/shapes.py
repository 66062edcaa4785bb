"""Faults of ConvNets, Perceivers, autoencoders and other shapes (set E); see run.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import shapes_models  # registers its models
import torch
import torch.nn.functional as F
from classic import case, clean, later
from models import Lab
from torch import Tensor, nn

import ottava
from ottava.recipe import get_recipe


class Straight(torch.autograd.Function):
    """Multiplies in the forward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        return x * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def with_scaled_input(lab: Lab, name: str, factor: Callable[[], float]) -> None:
    """The layer (without a bias) sees its input times a factor, and the model nothing of it."""
    layer, current = lab.layer(name), [1.0]
    layer.bias = None

    def before(_: Any, args: Any) -> Any:
        current[0] = factor()
        return (Straight.apply(args[0], current[0]),)

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(lambda _, __, y: Straight.apply(y, 1 / current[0]))


def with_all_layers(lab: Lab) -> None:
    """Converts the head and the router too."""
    lab.convert = lambda model, recipe: ottava.convert(model, recipe, filter=lambda name, layer: True)


def with_sgd(lab: Lab, momentum: float = 0.9) -> None:
    """SGD in place of Adam."""
    lab.make_optimizer = lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=momentum)


# --- FP8 is to blame -------------------------------------------------------------------------------------------------
@case("E", "lstm", "row outlier channel", "inputs", steps=24, lr=2e-2)
def candidates_in_smaller_units(lab: Lab) -> None:
    """A gain behind the frozen layer makes up for the tiny rows of one gate; four gates have one scale."""
    gain = torch.cat([torch.ones(144), torch.full((48,), 2.0**20)])
    for i in range(2):
        layer = lab.layer(f"inputs.{i}").requires_grad_(False)
        layer.weight.div_(gain[:, None])
        layer.bias.div_(gain)
        layer.register_forward_hook(lambda _, __, y: y * gain.to(y.dtype))


@case("E", "unet", "channel", "join", steps=20)
def long_skip_is_not_normalized(lab: Lab) -> None:
    """Half of a concatenation is as loud as an unnormalized stream; the frozen weights make up for it."""
    scale = torch.cat([torch.full((48,), 2.0**-18), torch.ones(48)])
    lab.layer("join").weight.requires_grad_(False).div_(scale)
    lab.change_input("join", lambda x: x * scale.to(x.dtype))


@case("E", "shared", "token row outlier", "mlp.shared")
def rubbish_in_the_padding_rows(lab: Lab) -> None:
    """Rows that pad the batch were never written; nobody reads what comes of them."""
    for i in range(3):
        feed = lab.layer(f"blocks.{i}.mlp.shared")
        feed.register_forward_pre_hook(lambda _, args: (torch.cat([args[0], torch.full_like(args[0][:16], 1e9)]),))
        feed.register_forward_hook(lambda _, __, y: y[:-16])


@case("E", "gptj", "clip jump gradient growth", "", recipe="delayed", every=1)
def loss_scaler_grows_each_step(lab: Lab) -> None:
    """The dynamic loss scale of FP16 training on top of predicted scales."""
    scale = lambda: 2.0 ** (3 * lab.step - 10)  # noqa: E731
    lab.change_loss = lambda loss: loss * scale()

    def unscale() -> None:
        for parameter in lab.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= scale()

    lab.after_backward.append(unscale)


@case("E", "mla", "growth channel", "kv_up", steps=24)
def one_dimension_of_the_latent_grows(lab: Lab) -> None:
    """The norm's gain grows and the weights of the next layer shrink: the product stays."""
    mixers = [lab.layer(f"blocks.{i}.mixer") for i in range(3)]
    for mixer in mixers:
        mixer.kv_norm.requires_grad_(False)
        mixer.kv_up.weight.requires_grad_(False)

    def grow() -> None:
        for mixer in mixers:
            mixer.kv_norm.weight[7] *= 2.2
            mixer.kv_up.weight[:, 7] /= 2.2

    lab.before_step.append(grow)


@case("E", "shared", "router_fp8", "router")
def every_layer_is_converted(lab: Lab) -> None:
    with_all_layers(lab)
    for i in range(3):
        with torch.no_grad():  # experts that are nearly equal to the router
            router = lab.layer(f"blocks.{i}.mlp.router")
            router.weight.mul_(0.02).add_(0.3 * torch.randn(1, 48, generator=lab.generator(i)))


@case("E", "gptj", "margin_high", "mlp", recipe="delayed")
def margin_of_fifteen_for_the_mlps(lab: Lab) -> None:
    recipe = get_recipe("delayed")
    spec = recipe.fprop.lhs
    assert spec is not None
    lab.recipe = recipe.override("*.mlp.*", cells=dict.fromkeys(("fprop.lhs", "wgrad.rhs"), replace(spec, margin=15)))


@case("E", "gqa", "old_spike frozen", "proj", recipe=get_recipe("delayed", amax_history_len=1024), steps=24)
def long_history_remembers_the_warm_up(lab: Lab) -> None:
    """Loud for three steps, then two hundred thousand times quieter; the history is a thousand steps long."""
    for i in range(3):
        with_scaled_input(lab, f"blocks.{i}.mixer.proj", lambda: 1.0 if lab.step <= 3 else 2.0**-18)


@case("E", "convnet", "gradient channel", "head", recipe="tensorwise_e4m3", steps=20)
def coordinates_in_other_units(lab: Lab) -> None:
    """One head for two tasks; the loss of one is a hundred million times larger."""
    with_all_layers(lab)

    def loss_of(y: Tensor, labels: Tensor) -> Tensor:
        classes, places = y.float().split([32, 32], 1)
        return F.cross_entropy(classes, labels[:, 0].long()) + 1e8 * F.mse_loss(places, labels[:, 1:])

    lab.loss_of = loss_of


@case("E", "perceiver", "two_sites", "reads.0", recipe=get_recipe("delayed", amax_history_len=1))
def weights_shared_by_two_reads(lab: Lab) -> None:
    """One layer reads a loud signal, then a quiet one, with one predicted scale."""
    lab.model.reads[1] = lab.model.reads[0]
    for name in ("q", "k", "v"):
        calls = [0]

        def factor(calls: list[int] = calls) -> float:
            calls[0] += 1
            return 1.0 if calls[0] % 2 else 2.0**-16

        with_scaled_input(lab, f"reads.0.{name}", factor)


# --- FP8 is not to blame ---------------------------------------------------------------------------------------------
@case("E", "bert", "labels leak", "", fp8=False, steps=24)
def labels_were_masked_too(lab: Lab) -> None:
    """The labels are a view of the ids: each one is the mask."""
    lab.change_batch = lambda b: [b[0], torch.where(b[1] >= 0, b[0], b[1])]


@case("E", "mae", "clip_grad vanish", "", fp8=False, clip=1.0, lr=0.1)
def clipped_before_unscaling(lab: Lab) -> None:
    """The loss scale is divided out after the clipping."""

    def unscale(optimizer: Any, *_: Any) -> None:
        for parameter in lab.model.parameters():
            parameter.grad /= 65536

    def make(parameters: Any, lr: float) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9)
        optimizer.register_step_pre_hook(unscale)
        return optimizer

    lab.make_optimizer = make
    lab.change_loss = lambda loss: loss * 65536


@case("E", "gqa", "lr_zero vanish lr", "", fp8=False)
def warm_up_counts_samples(lab: Lab) -> None:
    """The warm-up is a million steps long."""
    lab.before_step.append(
        lambda: [group.update(lr=3e-3 * lab.step / 1e6) for group in lab.optimizer.param_groups] and None
    )


@case("E", "bert", "twin lr", "", fp8=False, with_twin=True, lr=0.2, steps=20)
def norms_behind_without_a_warm_up(lab: Lab) -> None:
    """A rate that BERT does not survive, in BF16 or in FP8."""


@case("E", "perceiver", "absurd_data nonfinite_data", "", fp8=False)
def padding_of_the_lowest_number(lab: Lab) -> None:
    """Short signals are padded with the lowest BF16 number, which a mask should have taken away."""

    def change(batch: list[Tensor]) -> list[Tensor]:
        signal = batch[0].clone()
        signal[::4, 20:] = torch.finfo(torch.bfloat16).min
        return [signal, *batch[1:]]

    lab.change_batch = change


@case("E", "convnet", "eval_mode", "", fp8=False)
def batch_norms_in_evaluation_mode(lab: Lab) -> None:
    """Somebody called eval() before the training; the batch norms use their first statistics for ever."""
    lab.before_step.append(lambda: lab.model.eval() and None)


@case("E", "shared", "no_optimizer", "experts.3", fp8=False)
def expert_added_after_the_optimizer(lab: Lab) -> None:
    lab.parameters = lambda model: [p for name, p in model.named_parameters() if "experts.3" not in name]


@case("E", "mla", "nonfinite_compute", "blocks.1", fp8=False, recipe="rowwise")
def exponentials_overflow(lab: Lab) -> None:
    """A softmax of its own without subtracting the maximum; queries become sharp."""

    def sharpen() -> None:
        mixer = lab.layer("blocks.1.mixer")
        mixer.stable, mixer.sharpness = False, 500.0

    later(lab, 7, sharpen)


@case("E", "gptj", "twin lr", "", fp8=False, with_twin=True, accumulate=4, lr=1.0, steps=14)
def microbatches_are_summed(lab: Lab) -> None:
    """The loss of a microbatch is not divided by their number, and SGD takes four times the step."""
    with_sgd(lab)
    lab.change_loss = lambda loss: 4 * loss


@case("E", "unet", "same_batch", "", fp8=False, steps=18)
def workers_share_a_seed(lab: Lab) -> None:
    """Three workers of a loader, one seed: each batch comes three times."""
    kept: list[Any] = [None]

    def change(batch: list[Tensor]) -> list[Tensor]:
        if lab.step % 3 == 1:
            kept[0] = batch
        return kept[0]

    lab.change_batch = change


@case("E", "convnet", "labels", "", fp8=False, steps=20)
def sorted_by_class(lab: Lab) -> None:
    """Nobody shuffled: a batch holds one class."""

    def change(batch: list[Tensor]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(lab.step)
        many = [shapes_models.photographs(generator) for _ in range(16)]
        image, labels = (torch.cat(parts) for parts in zip(*many, strict=True))
        rows = labels[:, 0] == (lab.step - 1) // 2
        return [image[rows][:16], labels[rows][:16]]

    lab.change_batch = change


class Normed(nn.Linear):
    """Divides its weight by its norm before the product."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight / self.weight.norm(dim=1, keepdim=True), self.bias)


@case("E", "gqa", "unconverted", "blocks.2", fp8=False)
def own_kind_of_linear(lab: Lab) -> None:
    """A subclass with a forward of its own, which `convert` leaves alone."""
    block = lab.layer("blocks.2")
    for owner, name in ((block.mlp, "fc1"), (block.mlp, "fc2"), (block.mixer, "q"), (block.mixer, "proj")):
        old = getattr(owner, name)
        setattr(owner, name, Normed(old.in_features, old.out_features, bias=old.bias is not None))


@case("E", "gptj", "no_optimizer vanish", "", fp8=False, steps=20)
def reloaded_by_assignment(lab: Lab) -> None:
    """A rollback assigns new parameters; the optimizer goes on with the old ones."""

    def reload() -> None:
        state = {name: x.clone() if isinstance(x, Tensor) else x for name, x in lab.model.state_dict().items()}
        lab.model.load_state_dict(state, assign=True)

    later(lab, 8, reload)


# --- clean runs ------------------------------------------------------------------------------------------------------
def _tiny_branches(lab: Lab) -> None:
    for i in range(3):
        nn.init.constant_(lab.layer(f"blocks.{i}").gain, 1e-3)


def _fast(lab: Lab) -> None:
    with_sgd(lab)
    lab.lr = 0.1


def _uneven(lab: Lab) -> None:
    for i in range(3):
        lab.layer(f"blocks.{i}.mlp.router").bias.data.copy_(torch.tensor([0.4, 0.0, 0.0, 0.0]))


def _warm_up(lab: Lab) -> None:
    lab.clip = 1.0
    lab.before_step.append(
        lambda: [group.update(lr=3e-3 * min(1, lab.step / 10)) for group in lab.optimizer.param_groups] and None
    )


def _frozen_bottom(lab: Lab) -> None:
    for name in ("embed", "blocks.0", "blocks.1"):
        lab.layer(name).requires_grad_(False)
    lab.parameters = lambda model: [p for p in model.parameters() if p.requires_grad]


def _small_batches(lab: Lab) -> None:
    lab.change_batch = lambda batch: [x[:1] for x in batch]


def _loud_channel(lab: Lab) -> None:
    with torch.no_grad():
        lab.layer("middle.norm1").weight[5] = 30.0


def _sparse(lab: Lab) -> None:
    for i in range(2):
        nn.init.constant_(lab.layer(f"mlps.{i}.fc1").bias, -1.0)


def _decays(lab: Lab) -> None:
    lab.make_optimizer = lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, weight_decay=0.3)


for _kind, _recipe, _label, _inject, _options in (
    ("gptj", "tensorwise", "branches of a thousandth", _tiny_branches, {}),
    ("convnet", "delayed", "SGD, a high rate", _fast, {}),
    ("shared", "rowwise", "uneven experts", _uneven, {}),
    ("bert", "delayed", "warm-up and clipping", _warm_up, {}),
    ("gqa", "tensorwise", "frozen bottom", _frozen_bottom, {}),
    ("lstm", "tensorwise", "one sequence a step", _small_batches, {"steps": 24, "lr": 1e-2}),
    ("unet", "tensorwise_e4m3", "a channel thirty times as loud", _loud_channel, {}),
    ("perceiver", "blockwise", "sparse units", _sparse, {}),
    ("mae", "guarded", "weight decay", _decays, {"lr": 1e-2}),
):
    clean("E", _kind, _recipe, _label, inject=_inject, **_options)
