"""Faults of small GPTs, Llamas, ViTs, mixers, encoder-decoders and experts (sets A and B); see run.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from models import VOCABULARY, Lab
from torch import Tensor

import ottava
from ottava.engine.quantizer import Quantizer
from ottava.recipe import get_recipe


@dataclass(frozen=True)
class Case:
    """A faulty or clean run and what should be said of it."""

    name: str
    half: str
    kind: str
    """The model."""
    family: tuple[str, ...]
    """Families of causes that its author names; (): clean."""
    place: str = ""
    """Part of the name of the layer, or "" if the fault has no place."""
    fp8: bool = True
    """Whether FP8 is to blame."""
    recipe: Any = "tensorwise"
    inject: Callable[[Lab], None] | None = None
    with_twin: bool = False
    """Diagnosed beside its BF16 twin, which has the same fault."""
    options: Mapping[str, Any] = field(default_factory=dict)


CASES: list[Case] = []


def case(half: str, kind: str, family: str, place: str = "", *, fp8: bool = True, **rest: Any) -> Any:
    """Registers a fault."""
    known = {key: rest.pop(key) for key in ("recipe", "with_twin") if key in rest}

    def add(inject: Callable[[Lab], None]) -> Callable[[Lab], None]:
        name = f"{inject.__name__} in {kind}"
        CASES.append(Case(name, half, kind, tuple(family.split()), place, fp8, inject=inject, options=rest, **known))
        return inject

    return add


def later(lab: Lab, step: int, action: Callable[[], None]) -> None:
    """Does it before that step."""
    lab.before_step.append(lambda: action() if lab.step == step else None)


def times(channel: int, factor: float) -> Callable[[Tensor], Tensor]:
    """Multiplies a channel."""

    def change(x: Tensor) -> Tensor:
        scale = torch.ones(x.shape[-1], dtype=x.dtype)
        scale[channel] = factor
        return x * scale

    return change


# --- outliers and ranges --------------------------------------------------------------------------------------------
@case("A", "gpt", "channel", "blocks.1.mlp.fc1")
@case("B", "llama", "channel", "blocks.1.mlp", recipe="delayed")
def norm_gain(lab: Lab) -> None:
    lab.layer("blocks.1.norm2").weight.data[5] = 3e4


@case("A", "vit", "channel", "blocks.2.mlp.fc2", recipe="rowwise")
@case("B", "encdec", "channel", "blocks.0.mlp.fc2")
def unit_bias(lab: Lab) -> None:
    name = next(
        n
        for n, _ in lab.model.named_modules()
        if n.endswith(("2.mlp.fc1", "blocks.0.mlp.fc1")) and (lab.model.kind == "vit") == n.endswith("2.mlp.fc1")
    )
    lab.layer(name).bias.data[7] = 5e4


@case("B", "moe", "channel", "blocks.1.mixer.proj")
def value_channel(lab: Lab) -> None:
    lab.change_input("blocks.1.mixer.proj", times(9, 3e5))


@case("A", "mixer", "channel", "blocks.0.mlp.fc1")
def weight_column(lab: Lab) -> None:
    later(lab, 1, lambda: lab.layer("blocks.0.mlp.fc1").weight.data[:, 3].mul_(2e5))


@case("A", "llama", "token row outlier", "blocks.1.mlp")
def massive_token(lab: Lab) -> None:
    def change(x: Tensor) -> Tensor:
        scale = torch.ones(x.shape[1], 1, dtype=x.dtype)
        scale[0] = 1e5
        return x * scale

    lab.change_input("blocks.1.mlp.fc2", change)


@case("B", "vit", "token row outlier", "blocks.1.mixer.proj")
def massive_patch(lab: Lab) -> None:
    def change(x: Tensor) -> Tensor:
        scale = torch.ones(x.shape[1], 1, dtype=x.dtype)
        scale[4:6] = 4e4
        return x * scale

    lab.change_input("blocks.1.mixer.proj", change)


@case("A", "encdec", "gradient", "blocks.1", recipe="tensorwise_e4m3")
def wide_gradient(lab: Lab) -> None:
    generator = lab.generator()
    lab.change_gradient(
        "blocks.1.mlp.fc1", lambda g: g * torch.exp(4.5 * torch.randn(g.shape, generator=generator)).to(g.dtype)
    )


@case("B", "gpt", "gradient token row", "blocks.2.mlp.fc2")
def weighted_tokens(lab: Lab) -> None:
    generator = lab.generator()

    def change(g: Tensor) -> Tensor:
        return g * torch.exp(7 * torch.randn(*g.shape[:-1], 1, generator=generator)).to(g.dtype)

    lab.change_gradient("blocks.2.mlp.fc2", change)


# --- settings of scales ---------------------------------------------------------------------------------------------
@case("A", "gpt", "margin_low", "", recipe=get_recipe("delayed", margin=-4))
@case("B", "mixer", "margin_low", "", recipe=get_recipe("delayed", margin=-3))
def margin_too_low(lab: Lab) -> None:
    pass


@case("A", "llama", "margin_high", "", recipe=get_recipe("delayed", margin=14))
@case("B", "vit", "margin_high", "", recipe=get_recipe("delayed", margin=11))
def margin_too_high(lab: Lab) -> None:
    pass


def frozen(lab: Lab) -> None:
    """The layer's input grows after its history stopped."""

    def hold() -> None:
        for door in lab.layer("blocks.1.mlp.fc1").modules():
            if isinstance(door, Quantizer) and getattr(door, "scale", None) is not None and lab.step > 3:
                for name, value in kept.setdefault(id(door), {n: b.clone() for n, b in door.named_buffers()}).items():
                    getattr(door, name).copy_(value)

    kept: dict[int, dict[str, Tensor]] = {}
    lab.after_step.append(hold)


@case("A", "gpt", "frozen", "blocks.1.mlp.fc1", recipe="delayed", steps=20)
def frozen_scale_input_grows(lab: Lab) -> None:
    frozen(lab)
    lab.change_input("blocks.1.mlp.fc1", lambda x: x * 2.0 ** (0.4 * lab.step))


@case("B", "encdec", "frozen", "blocks.1.mlp.fc1", recipe=get_recipe("delayed", amax_history_len=4), steps=20)
def frozen_scale_input_shrinks(lab: Lab) -> None:
    frozen(lab)
    lab.change_input("blocks.1.mlp.fc1", lambda x: x * 2.0 ** (-0.8 * lab.step))


@case("A", "llama", "two_sites", "blocks.0.mlp.fc1", recipe=get_recipe("delayed", amax_history_len=1))
@case("B", "gpt", "two_sites", "blocks.0.mlp.fc1", recipe=get_recipe("delayed", amax_history_len=1), accumulate=1)
def shared_layer(lab: Lab) -> None:
    first, second = lab.layer("blocks.0.mlp"), lab.layer("blocks.2.mlp")
    second.fc1 = first.fc1
    lab.layer("blocks.2.norm2").weight.data.mul_(300)
    lab.layer("blocks.2.norm2").bias.data.mul_(300) if hasattr(lab.layer("blocks.2.norm2"), "bias") else None


@case("A", "vit", "clip jump", "blocks.1.mlp.fc1", recipe="delayed", every=1)
def amax_jump(lab: Lab) -> None:
    lab.change_input("blocks.1.mlp.fc1", lambda x: x * (64.0 if lab.step >= 9 else 1.0))


@case("B", "moe", "clip jump", "blocks.1.mixer.proj", recipe="delayed", every=1)
def gradual_jump(lab: Lab) -> None:
    lab.change_input("blocks.1.mixer.proj", lambda x: x * (2.0 ** max(0, lab.step - 6) if lab.step < 12 else 32.0))


@case("A", "mixer", "old_spike", "blocks.1.mlp.fc1", recipe=get_recipe("delayed", amax_history_len=64), steps=20)
def early_spike(lab: Lab) -> None:
    lab.change_input("blocks.1.mlp.fc1", lambda x: x * (3e4 if lab.step == 5 else 1.0))


@case("B", "gpt", "row outlier token channel", "blocks.1.mlp.fc1", recipe="delayed")
def weight_row(lab: Lab) -> None:
    later(lab, 1, lambda: lab.layer("blocks.1.mlp.fc1").weight.data[3].mul_(3e5))


# --- data ----------------------------------------------------------------------------------------------------------
def poisoned(at: int, value: float, lab: Lab) -> Callable[[list[Tensor]], list[Tensor]]:
    def change(batch: list[Tensor]) -> list[Tensor]:
        if lab.step == at:
            batch[0] = batch[0].clone()
            batch[0].view(-1)[7] = value
        return batch

    return change


@case("A", "vit", "nonfinite_data", "", fp8=False)
def nan_in_batch(lab: Lab) -> None:
    lab.change_batch = poisoned(9, math.nan, lab)


@case("B", "mixer", "nonfinite_data", "", fp8=False, recipe="delayed")
def infinity_in_batch(lab: Lab) -> None:
    lab.change_batch = poisoned(7, math.inf, lab)


@case("A", "mixer", "absurd_data", "", fp8=False)
@case("B", "vit", "absurd_data", "", fp8=False, recipe="delayed")
def absurd_batch(lab: Lab) -> None:
    lab.change_batch = lambda batch: [batch[0] * (1e4 if lab.step == 9 else 1.0), batch[1]]


@case("A", "gpt", "labels", "", fp8=False)
def labels_all_ignored(lab: Lab) -> None:
    lab.change_batch = lambda b: [b[0], torch.full_like(b[1], -100) if lab.step == 8 else b[1]]


@case("B", "encdec", "labels", "", fp8=False)
def labels_mostly_ignored(lab: Lab) -> None:
    def change(batch: list[Tensor]) -> list[Tensor]:
        labels = batch[-1].clone()
        labels[:, 1:] = -100
        labels[1:] = -100
        return [*batch[:-1], labels if lab.step % 2 else torch.full_like(labels, -100)]

    lab.change_batch = change


@case("A", "llama", "nonfinite_compute", "blocks.1", fp8=False)
def overflow_in_block(lab: Lab) -> None:
    def change(x: Tensor) -> Tensor:
        return x / (0.0 if lab.step >= 7 else 1.0)

    lab.change_input("blocks.1.mlp.fc2", change)


@case("B", "gpt", "nonfinite_compute", "blocks.2", fp8=False, recipe="delayed")
def log_of_negative(lab: Lab) -> None:
    lab.change_input("blocks.2.mixer.proj", lambda x: x + (x.float().log() * 0).to(x.dtype) if lab.step >= 6 else x)


@case("A", "vit", "same_batch", "", fp8=False)
def one_batch_again_and_again(lab: Lab) -> None:
    kept: list[Any] = []
    lab.change_batch = lambda batch: kept[0] if kept else kept.append(batch) or batch


# --- training ------------------------------------------------------------------------------------------------------
@case("A", "gpt", "lr", "", fp8=False, lr=3.0)
@case("B", "vit", "lr", "", fp8=False, lr=1.0, recipe="delayed")
def lr_too_high(lab: Lab) -> None:
    pass


@case("B", "llama", "lr", "", fp8=False, lr=30.0)
def sgd_lr_too_high(lab: Lab) -> None:
    lab.make_optimizer = lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9)


@case("A", "mixer", "lr", "", fp8=False)
@case("B", "gpt", "lr", "", fp8=False, with_twin=True)
def lr_jumps(lab: Lab) -> None:
    def jump() -> None:
        for group in lab.optimizer.param_groups:
            group["lr"] = 2.0

    later(lab, 9, jump)


@case("A", "vit", "twin lr start", "", fp8=False, with_twin=True, steps=20)
@case("B", "moe", "twin lr start", "", fp8=False, with_twin=True, steps=20, recipe="delayed")
def init_too_large(lab: Lab) -> None:
    for parameter in lab.model.parameters():
        parameter.data.mul_(8)
    lab.lr = 0.3


@case("A", "llama", "vanish", "", fp8=False, bf16=True, lr=1e-6)
@case("B", "encdec", "vanish", "", fp8=False, bf16=True, lr=3e-6, recipe="delayed")
def bf16_updates_vanish(lab: Lab) -> None:
    pass


@case("A", "gpt", "adam_eps vanish", "", fp8=False)
def adam_eps(lab: Lab) -> None:
    lab.make_optimizer = lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, eps=1e3)


@case("A", "vit", "double_step", "", fp8=False)
@case("B", "llama", "double_step", "", fp8=False)
def two_optimizer_steps(lab: Lab) -> None:
    lab.after_step.append(lambda: None)
    lab.zero_grad = False
    lab.after_step.append(lambda: (lab.optimizer.step(), lab.optimizer.zero_grad()))


@case("A", "encdec", "no_zero_grad", "", fp8=False, zero_grad=False)
@case("B", "mixer", "no_zero_grad", "", fp8=False, zero_grad=False, recipe="delayed")
def gradients_pile_up(lab: Lab) -> None:
    pass


@case("A", "encdec", "dead_units", "blocks.1.mlp", fp8=False)
@case("B", "gpt", "dead_units", "blocks.1.mlp", fp8=False)
def dead_units(lab: Lab) -> None:
    lab.layer("blocks.1.mlp.fc1").bias.data.fill_(-60.0)


@case("A", "moe", "dead_experts", "blocks.1.mlp", fp8=False)
def router_collapse(lab: Lab) -> None:
    lab.layer("blocks.1.mlp.router").weight.data[1:].zero_()
    lab.layer("blocks.1.mlp.router").weight.data[0] = 5.0
    lab.layer("blocks.1.norm2").bias.data.fill_(1.0)


@case("B", "moe", "dead_experts", "blocks.2.mlp", fp8=False, recipe="delayed")
def two_dead_experts(lab: Lab) -> None:
    behind = torch.tensor([0.0, 0.0, -50.0, -50.0])
    lab.layer("blocks.2.mlp.router").register_forward_hook(lambda _, __, y: y + behind.to(y.dtype))


@case("A", "moe", "router_fp8", "router", fp8=True)
@case("B", "moe", "router_fp8", "router", fp8=True, recipe="delayed")
def router_in_fp8(lab: Lab) -> None:
    lab.convert = lambda model, recipe: ottava.convert(model, recipe, filter=lambda name, layer: True)


@case("A", "gpt", "no_optimizer", "blocks.2", fp8=False)
def block_without_optimizer(lab: Lab) -> None:
    lab.parameters = lambda m: [p for name, p in m.named_parameters() if not name.startswith("blocks.2")]


@case("B", "vit", "no_optimizer", "head", fp8=False)
def head_without_optimizer(lab: Lab) -> None:
    lab.parameters = lambda m: [p for name, p in m.named_parameters() if "head" not in name]


@case("A", "mixer", "unconverted", "blocks.1", fp8=False)
@case("B", "encdec", "unconverted", "blocks.1", fp8=False)
def block_left_out(lab: Lab) -> None:
    lab.convert = lambda model, recipe: ottava.convert(
        model, recipe, filter=lambda name, layer: not name.startswith("blocks.1")
    )


@case("A", "gpt", "clip_grad vanish", "", fp8=False, clip=1e-6)
@case("B", "llama", "clip_grad vanish", "", fp8=False, clip=1e-5)
def clipped_to_nothing(lab: Lab) -> None:
    lab.make_optimizer = lambda parameters, lr: torch.optim.SGD(parameters, lr=lr)


@case("A", "gpt", "tied", "head", fp8=False, tied=True)
def tied_weights_part(lab: Lab) -> None:
    def part() -> None:
        lab.model.head.weight = torch.nn.Parameter(lab.model.head.weight.detach().clone())
        lab.optimizer.add_param_group({"params": [lab.model.head.weight]})

    later(lab, 5, part)


@case("B", "llama", "tied", "head", fp8=False, tied=True)
def tied_by_copy_only(lab: Lab) -> None:
    lab.model.head.weight = torch.nn.Parameter(lab.model.embed.weight.detach().clone())


@case("A", "vit", "constant_loss", "", fp8=False)
def detached_features(lab: Lab) -> None:
    lab.layer("head").register_forward_pre_hook(lambda _, args: (args[0] * 0,))


@case("B", "gpt", "constant_loss vanish lr_zero", "", fp8=False, lr=0.0)
def lr_of_zero(lab: Lab) -> None:
    pass


@case("A", "encdec", "eval_mode", "", fp8=False, dropout=0.3)
def training_in_eval_mode(lab: Lab) -> None:
    lab.model.eval()


@case("B", "gpt", "eval_mode", "", fp8=False, dropout=0.3)
def evaluation_with_dropout(lab: Lab) -> None:
    def evaluate() -> None:
        with torch.no_grad():
            lab.model(torch.randint(0, VOCABULARY, (4, 16), generator=lab.generator()))

    lab.after_step.append(evaluate)


@case("A", "mixer", "eval_recipe", "", fp8=False)
def evaluation_in_bf16(lab: Lab) -> None:
    def evaluate() -> None:
        lab.model.eval()
        with torch.no_grad(), ottava.autocast("bf16", enabled=False):
            lab.model(torch.randn(4, 16, 12, generator=lab.generator()))
        lab.model.train()

    lab.after_step.append(evaluate)


# --- clean runs: nothing to say ------------------------------------------------------------------------------------
def clean(half: str, kind: str, recipe: Any, label: str = "", **options: Any) -> None:
    """Registers a run without a fault."""
    name = f"clean {kind} {label or (recipe if isinstance(recipe, str) else recipe.name)}"
    inject = options.pop("inject", None)
    CASES.append(Case(name, half, kind, (), recipe=recipe, inject=inject, options=options))


def _sgd(lab: Lab) -> None:
    lab.make_optimizer = lambda parameters, lr: torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def _warmup(lab: Lab) -> None:
    lab.before_step.append(
        lambda: [group.update(lr=3e-3 * min(1, lab.step / 8)) for group in lab.optimizer.param_groups] and None
    )


def _bf16_head(lab: Lab) -> None:
    lab.recipe = get_recipe("tensorwise").override("head", "bf16")


def _evaluates(lab: Lab) -> None:
    def evaluate() -> None:
        lab.model.eval()
        with torch.no_grad():
            lab.model(torch.randint(0, VOCABULARY, (4, 16), generator=lab.generator()))
        lab.model.train()

    lab.after_step.append(evaluate)


def _mse(lab: Lab) -> None:
    lab.loss_of = lambda y, labels: F.mse_loss(y.float(), F.one_hot(labels, y.shape[-1]).float())


for _half, _kind, _recipe, _options in (
    ("A", "gpt", "tensorwise", {"dropout": 0.1}),
    ("A", "llama", "delayed", {}),
    ("A", "vit", "blockwise", {"label": "warmup", "inject": _warmup}),
    ("A", "mixer", "rowwise", {"accumulate": 2}),
    ("A", "moe", "tensorwise", {}),
    ("A", "encdec", "mxfp8", {"clip": 1.0}),
    ("A", "gpt", "tensorwise", {"label": "BF16 head, tied", "tied": True, "inject": _bf16_head}),
    ("B", "gpt", "delayed", {"label": "evaluates", "dropout": 0.1, "inject": _evaluates}),
    ("B", "llama", "tensorwise", {"bf16": True, "lr": 1e-2}),
    ("B", "vit", "delayed", {"label": "sgd", "inject": _sgd}),
    ("B", "mixer", "tensorwise", {"label": "mse", "inject": _mse}),
    ("B", "moe", "delayed", {"steps": 24}),
    ("B", "encdec", "tensorwise", {"every": 4}),
    ("B", "vit", "bf16", {}),
    ("B", "gpt", "tensorwise_e4m3", {"clip": 1.0, "accumulate": 2}),
):
    clean(_half, _kind, _recipe, **_options)  # type: ignore[arg-type]
