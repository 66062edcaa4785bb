"""Set H, models included: sliding windows between sandwich norms, images with questions, a field
from coordinates, speech frames, a gated classifier. Written without knowledge of the diagnosis, see run.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from classic import case, clean, later
from models import BATCH, CLASSES, MODELS, TOKENS, VOCABULARY, WIDTH, Lab, make_batch
from shapes import with_scaled_input
from torch import Tensor, nn

from ottava.engine.quantizer import Quantizer
from ottava.recipe import get_recipe

SPAN, FRAMES, MELS = 6, 24, 32


# --- models ----------------------------------------------------------------------------------------------------------
class Heads(nn.Module):
    """Attention with separate projections; of itself or of a memory, in a window if there is one."""

    def __init__(self, window: int = 0) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.window = window

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        source = x if memory is None else memory
        q, k, v = (t.unflatten(-1, (3, -1)).transpose(1, 2) for t in (self.q(x), self.k(source), self.v(source)))
        mask = None
        if self.window:
            ago = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
            mask = (ago < self.window) & (ago >= 0)
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Squared(nn.Module):
    """An MLP with a squared ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Sandwich(nn.Module):
    """A norm before and behind each branch."""

    def __init__(self) -> None:
        super().__init__()
        self.before1, self.after1, self.before2, self.after2 = (nn.RMSNorm(WIDTH) for _ in range(4))
        self.mixer, self.mlp = Heads(SPAN), Squared()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.after1(self.mixer(self.before1(x)))
        return x + self.after2(self.mlp(self.before2(x)))


class Window(nn.Module):
    """A language model that looks a few tokens back."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(0.1 * torch.randn(TOKENS, WIDTH))
        self.blocks = nn.ModuleList(Sandwich() for _ in range(3))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Fusion(nn.Module):
    """A question looks at an image; one projection serves both."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.words = nn.Linear(32, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.see = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(),
                                 nn.Linear(2 * WIDTH, WIDTH))  # fmt: skip
        self.shared = nn.Linear(WIDTH, WIDTH, bias=False)
        self.image_norm, self.text_norm, self.norm = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.cross = nn.ModuleList(Heads() for _ in range(2))
        self.feed = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(),
                                                nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2))  # fmt: skip
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        seen = self.patches(image)
        seen = self.image_norm(self.shared(seen + self.see(seen)))
        text = self.text_norm(self.shared(self.words(ids)))
        for cross, feed in zip(self.cross, self.feed, strict=True):
            text = text + cross(text, seen)
            text = text + feed(text)
        return self.head(self.norm(text.mean(1)))


class Field(nn.Module):
    """A function of place and time from waves of both."""

    def __init__(self) -> None:
        super().__init__()
        waves = torch.randn(2, 16, generator=torch.Generator().manual_seed(5))
        self.register_buffer("waves", 1.5 * waves)
        self.layers = nn.ModuleList(nn.Linear(32 if i == 0 else 64, 64) for i in range(4))
        self.head = nn.Linear(64, 1)

    def forward(self, at: Tensor) -> Tensor:
        angles = at.float() @ self.waves.float()
        x = torch.cat([angles.sin(), angles.cos()], -1)
        for layer in self.layers:
            x = F.silu(layer(x))
        return self.head(x)


class Gated(nn.Module):
    """A norm, a gated linear unit, a convolution over frames of each channel, a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.depth, self.out = nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.depth(F.glu(self.up(self.norm(x)), -1).transpose(1, 2)).transpose(1, 2)
        return x + self.out(F.silu(y))


class Spoken(nn.Module):
    """Attention and a gated convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer, self.conv = nn.LayerNorm(WIDTH), Heads(), Gated()

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x + self.mixer(self.norm(x)))


class Speech(nn.Module):
    """A sound for each frame."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(MELS, WIDTH), nn.ModuleList(Spoken() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Rezero(nn.Module):
    """Branches behind learned gates."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.mixer = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Heads()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gates = nn.Parameter(torch.full((2,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gates[0] * self.mixer(self.norm1(x))
        return x + self.gates[1] * self.fc2(F.relu(self.fc1(self.norm2(x))))


class Classifier(nn.Module):
    """A class from a token of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.token = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.blocks = nn.ModuleList(Rezero() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = torch.cat([self.token.expand(len(x), -1, -1).to(x.dtype), x], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


# --- batches and losses ----------------------------------------------------------------------------------------------
def questions(generator: torch.Generator) -> list[Tensor]:
    """Patches, words, answers: five kinds of images, two kinds of questions."""
    kind, asked = (torch.randint(0, n, (4 * BATCH,), generator=generator) for n in (5, 2))
    templates = torch.randn(5, TOKENS, 32, generator=torch.Generator().manual_seed(6))
    ids = 32 * asked[:, None] + torch.randint(0, 32, (4 * BATCH, 8), generator=generator)
    return [templates[kind] + 0.5 * torch.randn(4 * BATCH, TOKENS, 32, generator=generator), ids, 5 * asked + kind]


def points(generator: torch.Generator) -> list[Tensor]:
    """Places and times, and a wave there."""
    at = 2 * torch.rand(256, 2, generator=generator) - 1
    return [at, ((3 * at[:, 0] - 2 * at[:, 1]).sin() + 0.5 * (2 * at[:, 1]).cos())[:, None]]


def sounds(generator: torch.Generator) -> list[Tensor]:
    """Frames, and which sound each holds: a sound lasts three frames."""
    templates = torch.randn(CLASSES, MELS, generator=torch.Generator().manual_seed(7))
    labels = torch.randint(0, CLASSES, (BATCH, FRAMES // 3), generator=generator).repeat_interleave(3, 1)
    return [templates[labels] + 0.7 * torch.randn(BATCH, FRAMES, MELS, generator=generator), labels]


def topics(generator: torch.Generator) -> list[Tensor]:
    """Words, and the topic that most of them are of."""
    labels = torch.randint(0, CLASSES, (4 * BATCH,), generator=generator)
    ids = 6 * labels[:, None] + torch.randint(0, 6, (4 * BATCH, TOKENS), generator=generator)
    other = torch.rand(ids.shape, generator=generator) < 0.3
    return [torch.where(other, torch.randint(0, VOCABULARY, ids.shape, generator=generator), ids), labels]


def squared(y: Tensor, target: Tensor) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(y.float(), target.float())


def smoothed(y: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with a tenth for all classes."""
    return F.cross_entropy(y.float(), labels, label_smoothing=0.1)


MODELS |= {
    "window": (Window, partial(make_batch, "gpt"), None),
    "fusion": (Fusion, questions, None),
    "field": (Field, points, squared),
    "speech": (Speech, sounds, None),
    "gated": (Classifier, topics, smoothed),
}


def doors(lab: Lab, kind: str) -> list[Quantizer]:
    """The doors of all layers for input, weight or grad_output that have a history."""
    found = [m for name, m in lab.model.named_modules() if name.endswith(f"quantizers.{kind}")]
    return [door for door in found if door.spec is not None]


# --- set H: numbers and scales --------------------------------------------------------------------------------------
@case("H", "window", "clip jump margin_low two_sites", "mlp.down", recipe="delayed", accumulate=3, steps=14)
def history_of_the_last_microbatch(lab: Lab) -> None:
    """Earlier microbatches never reach the history; the last one is short of long documents."""
    calls = [0]

    def forget(loss: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] % 3:
            for door in doors(lab, "input"):
                door.staged.zero_()
        return loss

    lab.change_loss = forget
    for i in range(3):  # the norm behind it takes the factor out again
        lab.change_input(f"blocks.{i}.mlp.down", lambda x: x * (1.0 if calls[0] % 3 == 2 else 40.0))


@case("H", "field", "frozen clip jump", "", recipe="delayed", steps=24)
def gradient_scales_stop_while_the_loss_scale_grows(lab: Lab) -> None:
    """Recomputation loses the updates of backward's scales, and what flows back doubles with each step."""
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def hold(*_: Any) -> None:
        for i, door in enumerate(doors(lab, "grad_output")):
            if lab.step == 4:
                kept[i] = (door.scale.clone(), door.amax_history.clone())
            elif i in kept:
                door.scale.copy_(kept[i][0])
                door.amax_history.copy_(kept[i][1])

    lab.layer("layers.3").register_forward_hook(hold)
    lab.change_gradient("head", lambda gradient: gradient * 2.0**lab.step)
    lab.after_backward.append(
        lambda: [p.grad.mul_(2.0**-lab.step) for p in lab.model.parameters() if p.grad is not None] and None
    )


@case("H", "window", "token row outlier", "blocks.1.mlp.down", steps=20)
def sink_token_is_squared(lab: Lab) -> None:
    """The first token's activation is some hundred times the others', and the ReLU behind it squares."""

    def change(x: Tensor) -> Tensor:
        scale = torch.ones(x.shape[1], 1, dtype=x.dtype)
        scale[0] = 450.0**2
        return x * scale

    lab.change_input("blocks.1.mlp.down", change)


@case("H", "speech", "channel outlier", "blocks.1.conv.out", recipe="rowwise", steps=20)
def pruned_channel_still_sounds(lab: Lab) -> None:
    """A channel whose weights are pruned is never normed, and is far above the others in every frame."""
    layer = lab.layer("blocks.1.conv.out")
    layer.weight.data[:, 7] = 0.0
    lab.change_input("blocks.1.conv.out", lambda x: x.where(torch.arange(WIDTH) != 7, 1.5e5))
    lab.after_backward.append(lambda: lab.layer("blocks.1.conv.out").weight.grad[:, 7].zero_())


@case("H", "fusion", "frozen start gradient margin_high", "", steps=20)
def scales_wait_for_an_interval_that_never_ends(lab: Lab) -> None:
    """Scales begin at 1 and are updated each thousandth step; the loss is an average over ranks as well."""
    lab.recipe = get_recipe("delayed", bootstrap=False)
    lab.change_loss = lambda loss: loss / 4096

    def hold(*_: Any) -> None:
        for door in doors(lab, "input") + doors(lab, "weight") + doors(lab, "grad_output"):
            door.scale.fill_(1.0)
            door.amax_history.zero_()

    lab.layer("patches").register_forward_pre_hook(hold)
    lab.layer("head").register_forward_hook(hold)


def trimmed(window: Tensor) -> Tensor:
    """An amax without what somebody took for outliers."""
    return window.max() / 48


@case("H", "gated", "margin_low clip", "", steps=20)
def amax_algorithm_trims_what_it_takes_for_outliers(lab: Lab) -> None:
    recipe = get_recipe("delayed")
    changes = {}
    for cell in ("fprop.lhs", "fprop.rhs", "wgrad.rhs", "dgrad.rhs"):
        gemm, side = cell.split(".")
        changes[cell] = replace(getattr(getattr(recipe, gemm), side), amax_compute_algo=trimmed)
    lab.recipe = recipe.override("*", cells=changes)


@case("H", "speech", "old_spike", "blocks.0.conv.out", recipe=get_recipe("delayed", amax_history_len=256), steps=22)
def click_in_one_batch_is_remembered(lab: Lab) -> None:
    with_scaled_input(lab, "blocks.0.conv.out", lambda: 3e5 if lab.step == 5 else 1.0)


@case("H", "fusion", "two_sites", "shared", recipe="delayed", steps=20)
def shared_projection_of_two_ranges(lab: Lab) -> None:
    """Patches come in the range of pixels, words in that of an embedding; each has its own norm behind."""
    lab.change_input("shared", lambda x: x * 2.0**20 if x.shape[1] == TOKENS else x)


@case("H", "window", "growth clip jump", "blocks.2.mlp.down", recipe="delayed", steps=22)
def squares_grow_behind_a_norm(lab: Lab) -> None:
    """Nothing holds the size of what a norm follows: each step it is a multiple of the last one's."""
    lab.change_input("blocks.2.mlp.down", lambda x: x * 5.0 ** max(0, lab.step - 3))


@case("H", "field", "token row outlier gradient", "", recipe="tensorwise_e4m3", steps=20)
def penalty_of_few_boundary_points(lab: Lab) -> None:
    """Four of 256 points carry a penalty, which layers.2 alone feels: its gradient is of a few rows."""
    factor = torch.ones(256, 1)
    factor[:4] = 3e6

    class Weighted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, up: bool) -> Tensor:
            ctx.up = up
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            scale = factor.to(gradient.dtype)
            return (gradient * scale if ctx.up else gradient / scale), None

    lab.layer("layers.2").register_forward_pre_hook(lambda _, args: (Weighted.apply(args[0], False),))
    lab.layer("layers.2").register_forward_hook(lambda _, __, y: Weighted.apply(y, True))


# --- set H: training and data ---------------------------------------------------------------------------------------
@case("H", "fusion", "labels", "", fp8=False, steps=18)
def answers_cut_off_by_a_length_limit(lab: Lab) -> None:
    """All answers of some batches lie behind the limit, so that each label is the ignored one."""
    lost = (7, 10, 13)
    lab.change_batch = lambda batch: [*batch[:-1], torch.full_like(batch[-1], -100) if lab.step in lost else batch[-1]]


@case("H", "gated", "lr loss_first", "", fp8=False, recipe="rowwise", steps=24)
def warm_restart_in_other_units(lab: Lab) -> None:
    """The schedule restarts at the half, with a peak of 0.6 in place of 3e-3."""
    later(lab, 13, lambda: [group.update(lr=0.6) for group in lab.optimizer.param_groups] and None)


@case("H", "speech", "lr_zero vanish", "", fp8=False, recipe="mxfp8", steps=24)
def schedule_ends_with_the_first_epoch(lab: Lab) -> None:
    """The length of a linear decay is the epoch's five steps, not the run's."""
    lab.before_step.append(
        lambda: [g.update(lr=3e-3 * max(0.0, 1 - (lab.step - 1) / 5)) for g in lab.optimizer.param_groups] and None
    )


@case("H", "gated", "weight_decay", "", fp8=False, recipe="tensorwise", steps=24)
def decay_is_not_multiplied_by_the_rate(lab: Lab) -> None:
    """A coefficient of another library's convention: a sixth of each weight goes in a step."""
    lab.make_optimizer = lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, weight_decay=60.0)


@case("H", "field", "adam_eps vanish", "", fp8=False, steps=24)
def eps_meant_for_summed_losses(lab: Lab) -> None:
    lab.make_optimizer = lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, eps=30.0)


@case("H", "window", "dead_units", "blocks.1.mlp", fp8=False, recipe="blockwise", steps=20)
def squared_units_never_wake(lab: Lab) -> None:
    """A bias from a broken import lies far below what the weights reach."""
    lab.layer("blocks.1.mlp.up").bias.data.fill_(-25.0)


@case("H", "fusion", "no_gradient frozen_parameters", "", fp8=False, steps=24)
def image_features_leave_the_graph(lab: Lab) -> None:
    """Features once were kept in a cache; the detach is still there."""
    lab.layer("image_norm").register_forward_pre_hook(lambda _, args: (args[0].detach(),))


@case("H", "speech", "absurd_data", "", fp8=False, recipe="tensorwise", steps=20)
def second_shard_holds_integers(lab: Lab) -> None:
    """From step 9 samples are 16-bit integers in place of fractions."""
    lab.change_batch = lambda batch: [batch[0] * (32768.0 if lab.step >= 9 else 1.0), batch[1]]


@case("H", "window", "leak labels", "", fp8=False, lr=1e-2, steps=24)
def labels_are_not_shifted(lab: Lab) -> None:
    """Another library's models shift labels themselves; this loop relies on it, and the model tells what it sees."""
    lab.change_batch = lambda batch: [batch[0], batch[0].clone()]


@case("H", "speech", "nonfinite_compute blank", "", fp8=False, recipe="delayed", steps=18)
def silence_is_divided_by_its_deviation(lab: Lab) -> None:
    """Each frame is normed inside the model, without an eps; the batch of step 11 has digital silence."""

    def silent(batch: list[Tensor]) -> list[Tensor]:
        if lab.step == 11:
            batch[0][2, 5:9] = 0.0
        return batch

    lab.change_batch = silent
    lab.change_input("embed", lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True))


# --- set H: clean ---------------------------------------------------------------------------------------------------
def _closed_gates(lab: Lab) -> None:
    for i in range(3):
        lab.layer(f"blocks.{i}").gates.data.zero_()


def _small_loss(lab: Lab) -> None:
    lab.change_loss = lambda loss: loss * 1e-6
    lab.make_optimizer = lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, eps=1e-16)


def _padded(lab: Lab) -> None:
    def pad(batch: list[Tensor]) -> list[Tensor]:
        length = torch.randint(12, FRAMES + 1, (BATCH,), generator=lab.generator(lab.step))
        past = torch.arange(FRAMES) >= length[:, None]
        return [batch[0].masked_fill(past[..., None], 0.0), batch[1].masked_fill(past, -100)]

    lab.change_batch = pad


def _hard_batch(lab: Lab) -> None:
    def surprise(batch: list[Tensor]) -> list[Tensor]:
        if lab.step != 12:
            return batch
        ids = torch.randint(0, VOCABULARY, (BATCH, TOKENS + 1), generator=lab.generator())
        return [ids[:, :-1], ids[:, 1:]]

    lab.change_batch, lab.clip = surprise, 1.0


def _loud_and_quiet(lab: Lab) -> None:
    lab.change_batch = lambda batch: [batch[0] * 4.0 ** math.sin(lab.step), batch[1]]


def _missing_images(lab: Lab) -> None:
    def drop(batch: list[Tensor]) -> list[Tensor]:
        absent = torch.rand(len(batch[0]), 1, 1, generator=lab.generator(lab.step)) < 0.2
        return [batch[0].masked_fill(absent, 0.0), *batch[1:]]

    lab.change_batch = drop


clean("H", "gated", "delayed", "gates that begin at zero", inject=_closed_gates, steps=20)
clean("H", "field", "tensorwise", "small loss", inject=_small_loss, steps=24)
clean("H", "speech", "rowwise", "padded frames without labels", inject=_padded, steps=20)
clean("H", "window", "tensorwise", "one hard batch", inject=_hard_batch, steps=24)
clean("H", "speech", "delayed", "loud and quiet recordings", inject=_loud_and_quiet, steps=20)
clean("H", "fusion", "mxfp8", "a fifth of the images left out", inject=_missing_images, steps=20)
