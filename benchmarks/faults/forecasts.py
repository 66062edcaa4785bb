"""Set I, models included: a forecaster of two views, sessions of a shop, a pyramid of patches,
experts beside attention, retention. Twelve faults and twelve healthy trainings; written without knowledge of it,
see run.py.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from classic import case, clean, later
from loops import with_rate
from models import MODELS, Lab
from shapes import with_scaled_input
from torch import Tensor, nn

from ottava.engine.quantizer import Quantizer
from ottava.recipe import get_recipe

WIDE, ITEMS, LENGTH, PAST, FUTURE, KINDS, HEADS = 64, 64, 16, 48, 16, 16, 4


# --- models ----------------------------------------------------------------------------------------------------------
class Stack(nn.Module):
    """Explains a part of what it reads, and forecasts from it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.out = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE + FUTURE)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        back, ahead = self.out(F.relu(self.fc2(F.relu(self.fc1(x))))).split((WIDE, FUTURE), -1)
        return x - back, ahead


class Forecast(nn.Module):
    """One reader sees the levels of a series and their changes; stacks hand on what they did not explain."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.level_norm, self.change_norm = nn.Linear(PAST, WIDE), nn.LayerNorm(WIDE), nn.LayerNorm(WIDE)
        self.stacks = nn.ModuleList(Stack() for _ in range(3))
        self.unit, self.spread, self.centre = 1.0, 1.0, 0.0

    def forward(self, series: Tensor) -> Tensor:
        change = F.pad(series.diff(dim=-1), (1, 0))
        x = self.level_norm(self.read(series * self.unit)) + self.change_norm(self.read(change))
        ahead: Any = 0.0
        for stack in self.stacks:
            x, part = stack(x)
            ahead = ahead + part
        return ahead.float() * self.spread + self.centre


class Heed(nn.Module):
    """Causal attention, or retention: products of q and k that decay, without a softmax, behind a gate."""

    def __init__(self, *, retain: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDE, WIDE, bias=False) for _ in range(4))
        self.gate = nn.Linear(WIDE, WIDE, bias=False) if retain else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.gate is None:
            return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        ago = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        keep = (1 - 2.0 ** -torch.arange(1.0, HEADS + 1))[:, None, None]
        decay = torch.where(ago >= 0, keep ** ago.clamp(min=0), 0.0).to(q.dtype)
        y = (q @ k.mT * decay / 4) @ v
        y = F.rms_norm(y.float(), y.shape[-1:], eps=1e-5).to(x.dtype).transpose(1, 2).flatten(2)
        return self.o(y * F.silu(self.gate(x)))


class Feeding(nn.Module):
    """FC1, ReLU or GELU, FC2."""

    def __init__(self, width: int, inner: int, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(width, inner), nn.Linear(inner, width), act

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Serial(nn.Module):
    """Attention or retention, then an MLP."""

    def __init__(self, *, retain: bool, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDE), nn.LayerNorm(WIDE)
        self.mixer, self.mlp = Heed(retain=retain), Feeding(WIDE, 2 * WIDE, F.gelu if retain else F.relu)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.mixer(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Beside(nn.Module):
    """Attention and experts read one norm; two experts of four answer, and one always."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer, self.always = nn.RMSNorm(WIDE), Heed(), Feeding(WIDE, WIDE, F.gelu)
        self.router = nn.Linear(WIDE, 4, bias=False)
        self.experts = nn.ModuleList(Feeding(WIDE, WIDE, F.gelu) for _ in range(4))
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm(x)
        flat = seen.flatten(0, 1)
        shares = self.router(flat).float().softmax(-1)
        best, chosen = shares.topk(2, -1)
        self.balance = 4 * (shares.mean(0) * F.one_hot(chosen, 4).float().mean((0, 1))).sum()
        y = torch.zeros_like(flat, dtype=torch.float32)
        for i, expert in enumerate(self.experts):
            rows, slots = (chosen == i).nonzero(as_tuple=True)
            if len(rows):
                y = y.index_add(0, rows, expert(flat[rows]).float() * best[rows, slots, None])
        return x + self.mixer(seen) + self.always(seen) + y.view_as(x)


class Sequence(nn.Module):
    """Ids to the next ids; the head may be the embedding's."""

    def __init__(self, block: Callable[[], nn.Module], *, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(ITEMS, WIDE), nn.Parameter(0.02 * torch.randn(LENGTH, WIDE))
        self.blocks, self.norm = nn.ModuleList(block() for _ in range(2)), nn.LayerNorm(WIDE)
        self.head = nn.Linear(WIDE, ITEMS, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1 if tied else 0.5)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Pyramid(nn.Module):
    """Residual MLPs on patches; four neighbours become one patch, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Linear(16, 32), nn.Dropout(0.0)
        self.norms = nn.ModuleList(nn.LayerNorm(w) for w in (32, 64, 64))
        self.mlps = nn.ModuleList(Feeding(w, 2 * w, F.relu) for w in (32, 64, 64))
        self.merges = nn.ModuleList(nn.Linear(4 * w, 64) for w in (32, 64))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, KINDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for i, (norm, mlp) in enumerate(zip(self.norms, self.mlps, strict=True)):
            x = x + self.drop(mlp(norm(x)))
            if i < 2:
                x = self.merges[i](x.unflatten(1, (-1, 4)).flatten(2))
        return self.head(self.norm(x.mean(1)))


def seasons(generator: torch.Generator) -> list[Tensor]:
    """Waves with a trend and noise: the past, then the future."""
    period, phase = 8 + 8 * torch.rand(64, 1, generator=generator), 6.28 * torch.rand(64, 1, generator=generator)
    time = torch.arange(float(PAST + FUTURE))
    y = (6.28 * time / period + phase).sin() + 0.01 * time * torch.randn(64, 1, generator=generator)
    y = y + 0.05 * torch.randn(y.shape, generator=generator)
    return [y[:, :PAST], y[:, PAST:]]


def sessions(generator: torch.Generator) -> list[Tensor]:
    """Items that follow from the last with surprises; sessions differ in length, padding has no label."""
    ids = torch.randint(1, ITEMS, (16, 1), generator=generator)
    for _ in range(LENGTH):
        following = (ids[:, -1:] * 5 + 1) % (ITEMS - 1) + 1
        surprise = torch.rand(following.shape, generator=generator) < 0.1
        ids = torch.cat(
            [ids, torch.where(surprise, torch.randint(1, ITEMS, (16, 1), generator=generator), following)], 1
        )
    padded = torch.arange(LENGTH) >= torch.randint(LENGTH // 2, LENGTH + 1, (16, 1), generator=generator)
    return [ids[:, :-1].masked_fill(padded, 0), ids[:, 1:].masked_fill(padded, -100)]


def mosaics(generator: torch.Generator) -> list[Tensor]:
    """Patches of sixteen kinds of pictures, with noise."""
    templates = torch.randn(KINDS, 16, 16, generator=torch.Generator().manual_seed(5))
    labels = torch.randint(0, KINDS, (32,), generator=generator)
    return [templates[labels] + 0.8 * torch.randn(32, 16, 16, generator=generator), labels]


def smooth(y: Tensor, target: Tensor) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(y.float(), target.float())


MODELS |= {
    "forecast": (Forecast, seasons, smooth),
    "shop": (lambda: Sequence(lambda: Serial(retain=False, dropout=0.0), tied=True), sessions, None),
    "pyramid": (Pyramid, mosaics, None),
    "beside": (lambda: Sequence(Beside), sessions, None),
    "retention": (lambda: Sequence(lambda: Serial(retain=True, dropout=0.0)), sessions, None),
}


# --- FP8 is to blame -------------------------------------------------------------------------------------------------
@case("I", "retention", "old_spike gradient", "", recipe=get_recipe("delayed", amax_history_len=64), steps=24)
def gradients_scaled_for_fp16_at_first(lab: Lab) -> None:
    """A scaler of FP16 that is still there begins at 2 ** 26 and gives up after four steps; the history remembers."""

    def scale() -> float:
        return 2.0**26 if lab.step <= 4 else 1.0

    lab.change_gradient("head", lambda g: g * scale())
    lab.after_backward.append(lambda: [p.grad.div_(scale()) for p in lab.model.parameters()] and None)


@case("I", "retention", "row outlier channel token", "mixer", steps=24)
def keys_and_queries_folded_unevenly(lab: Lab) -> None:
    """A merge put the whole norm of a channel of each head into the key; products are as before. Both are frozen."""
    for block in lab.model.blocks:
        q, k = block.mixer.q.weight, block.mixer.k.weight
        q.data[3::16] /= 3e6
        k.data[3::16] *= 3e6
        q.requires_grad_(False)
        k.requires_grad_(False)


@case("I", "forecast", "two_sites old_spike", "read", recipe="delayed", steps=24)
def levels_in_cents_and_changes_in_shares(lab: Lab) -> None:
    """One reader, two views: levels are a million times as large as changes; each has its own norm behind."""
    lab.model.unit = 4e6


@case("I", "forecast", "clip jump growth old_spike two_sites", "read",
      recipe=get_recipe("delayed", amax_history_len=1), steps=24, every=1)  # fmt: skip
def two_sources_by_turns(lab: Lab) -> None:
    """Numbers of the source of even steps are 2 ** 14 times as large; the scale of the last step is used."""
    lab.change_input("read", lambda x: x * (2.0**14 if lab.step % 2 == 0 else 1.0))


@case("I", "shop", "frozen clip growth margin_low jump", "mlp.fc2", recipe="delayed", steps=24)
def restored_with_old_scales(lab: Lab) -> None:
    """Each step begins with the scales and histories of step 3, and the products grow."""
    kept: dict[str, Tensor] = {}
    for i in range(2):
        with_scaled_input(lab, f"blocks.{i}.mlp.fc2", lambda: 1.8**lab.step)

    def restore() -> None:
        for name, door in lab.model.named_modules():
            if isinstance(door, Quantizer) and "fc2" in name and name.endswith("input"):
                for buffer in ("scale", "amax_history"):
                    value = getattr(door, buffer)
                    if lab.step == 3:
                        kept[name + buffer] = value.clone()
                    elif lab.step > 3:
                        value.copy_(kept[name + buffer])

    lab.before_step.append(restore)


@case("I", "retention", "channel outlier", "mixer.o", recipe="mxfp8", steps=24)
def heads_padded_with_old_memory(lab: Lab) -> None:
    """Heads of 12 lie in 16 lanes; nobody clears the other four, and the weights that read them are 0."""
    spare = torch.arange(WIDE) % 16 >= 12
    for i in range(2):
        layer = lab.layer(f"blocks.{i}.mixer.o")
        layer.weight.data[:, spare] = 0.0
        left = 6e6 * torch.rand(WIDE, generator=lab.generator(i))
        lab.change_input(f"blocks.{i}.mixer.o", lambda x, left=left: torch.where(spare, left.to(x.dtype), x))
        lab.after_backward.append(lambda layer=layer: layer.weight.grad.masked_fill_(spare, 0.0) is None)


# --- FP8 is not to blame ---------------------------------------------------------------------------------------------
@case("I", "shop", "labels no_learning constant_loss", "", fp8=False, recipe="rowwise", steps=32)
def labels_of_other_sessions(lab: Lab) -> None:
    """The loader shuffles inputs and labels on their own."""

    def shuffle(batch: list[Tensor]) -> list[Tensor]:
        ids, labels = batch
        order = torch.randperm(labels.numel(), generator=lab.generator(lab.step))
        return [ids, labels.flatten()[order].view_as(labels)]

    lab.change_batch = shuffle


@case("I", "pyramid", "lr loss_first", "", fp8=False, recipe="delayed", steps=28)
def restart_a_thousand_times_too_high(lab: Lab) -> None:
    """A cosine that restarts at step 15, at 3 in place of 0.003."""
    with_rate(lab, lambda step: (3e-3 if step < 15 else 3.0) * (0.55 + 0.45 * math.cos(math.pi * (step % 15) / 15)))


@case("I", "beside", "dead_experts sign", "", fp8=False, steps=32)
def balance_rewards_the_full(lab: Lab) -> None:
    """The loss that should spread tokens over experts has the wrong sign."""
    lab.change_loss = lambda loss: loss - sum(block.balance for block in lab.model.blocks)


@case("I", "retention", "weight_decay", "", fp8=False, recipe="blockwise", steps=32)
def decay_divided_by_the_rate(lab: Lab) -> None:
    """A decay of 0.15 a step, which the rate multiplies: somebody divided it by the rate."""
    lab.make_optimizer = lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, weight_decay=0.15 / lr)


@case("I", "forecast", "overwritten no_optimizer frozen_parameters vanish constant_loss no_learning", "", fp8=False,
      recipe="guarded", steps=24)  # fmt: skip
def offloaded_copies_come_back(lab: Lab) -> None:
    """Weights are fetched from a host copy before each step; nobody writes updates to it."""
    host: dict[str, Tensor] = {}

    def fetch() -> None:
        for name, p in lab.model.named_parameters():
            p.data.copy_(host.setdefault(name, p.detach().clone()))

    lab.before_step.append(fetch)


@case("I", "pyramid", "dropout", "", fp8=False, recipe="mxfp8", steps=32)
def kept_share_read_as_dropped_share(lab: Lab) -> None:
    """0.97 should be kept, and is dropped."""
    lab.model.drop.p = 0.97


# --- clean -----------------------------------------------------------------------------------------------------------
def _large_targets(lab: Lab) -> None:
    """Prices around 20,000; the model ends with their spread and mean; a Huber loss, a cosine."""
    lab.model.spread, lab.model.centre = 3000.0, 20000.0
    lab.change_batch = lambda batch: [batch[0], batch[1] * 3000 + 20000]
    lab.loss_of = lambda y, target: F.huber_loss(y, target, delta=3000.0)
    with_rate(lab, lambda step: 3e-3 * (0.51 + 0.49 * math.cos(math.pi * step / 28)))


def _sessions_smoothed(lab: Lab) -> None:
    """Tied weights, padding without labels, label smoothing."""
    lab.loss_of = lambda y, labels: F.cross_entropy(y.float().flatten(0, -2), labels.flatten(), label_smoothing=0.1)


def _momentum(lab: Lab) -> None:
    """SGD with Nesterov's momentum."""
    lab.make_optimizer = lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)


def _evaluated(lab: Lab) -> None:
    """Dropout, and an evaluation each fourth step."""
    for block in lab.model.blocks:
        block.drop.p = 0.1

    def evaluate() -> None:
        if lab.step % 4 == 0:
            lab.model.eval()
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                lab.model(sessions(lab.generator(lab.step))[0])
            lab.model.train()

    lab.after_step.append(evaluate)


def _zero_branches(lab: Lab) -> None:
    """Each branch begins at 0."""
    for mlp in lab.model.mlps:
        nn.init.zeros_(mlp.fc2.weight)
        nn.init.zeros_(mlp.fc2.bias)


def _imbalanced(lab: Lab) -> None:
    """Batches of 16, three quarters of one class."""

    def skew(batch: list[Tensor]) -> list[Tensor]:
        x, labels = batch
        templates = torch.randn(KINDS, 16, 16, generator=torch.Generator().manual_seed(5))
        common = torch.rand(len(labels), generator=lab.generator(lab.step)) < 0.75
        mixed = torch.where(common[:, None, None], x - templates[labels] + templates[0], x)
        return [mixed[:16], labels.masked_fill(common, 0)[:16]]

    lab.change_batch = skew


def _four_bits(lab: Lab) -> None:
    """The ends stay in BF16; warm-up, and a restart in the middle."""
    lab.recipe = get_recipe("nvfp4").override("embed", "bf16").override("merges.1", "bf16").override("head", "bf16")
    with_rate(lab, lambda step: 3e-3 * min(step / 4, 0.55 + 0.45 * math.cos(math.pi * (step % 14) / 14)))


def _balanced(lab: Lab) -> None:
    """A little of the balancing loss."""
    lab.change_loss = lambda loss: loss + 0.01 * sum(block.balance for block in lab.model.blocks)


class LowRank(nn.Module):
    """A frozen layer and an adapter that begins at 0."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down = base.requires_grad_(False), nn.Linear(base.in_features, 16, bias=False)
        self.up = nn.Linear(16, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def _adapted(lab: Lab) -> None:
    """Adapters on attention and the MLP of a frozen trunk; norms, embedding and head learn."""
    for block in lab.model.blocks:
        for owner, names in ((block.mixer, ("q", "k", "v", "o")), (block.mlp, ("fc1", "fc2"))):
            for name in names:
                setattr(owner, name, LowRank(getattr(owner, name)))
    lab.parameters = lambda model: [p for p in model.parameters() if p.requires_grad]


def _resumed(lab: Lab) -> None:
    """Model and optimizer are saved and loaded into a new optimizer before step 13."""

    def resume() -> None:
        model, optimizer = copy.deepcopy((lab.model.state_dict(), lab.optimizer.state_dict()))
        lab.model.load_state_dict(model)
        lab.optimizer = lab.make_optimizer(lab.parameters(lab.model), lab.lr)
        lab.optimizer.load_state_dict(optimizer)

    later(lab, 13, resume)


class Lion(torch.optim.Optimizer):
    """Steps by the sign of a mean of gradients (Chen et al. 2023, arXiv:2302.06675)."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    p.sub_(group["lr"] * mean.lerp(p.grad, 0.1).sign())
                    mean.lerp_(p.grad, 0.01)


def _lion(lab: Lab) -> None:
    """Lion with a warm-up."""
    lab.make_optimizer = Lion
    with_rate(lab, lambda step: 1e-3 * min(step / 6, 1.0))


clean("I", "forecast", "tensorwise", "large targets", inject=_large_targets, steps=28)
clean("I", "forecast", "guarded", "accumulated and clipped", accumulate=2, clip=0.5, steps=20)
clean("I", "shop", "delayed", "smoothed labels", inject=_sessions_smoothed, steps=28)
clean("I", "shop", "bf16", "watched with momentum", inject=_momentum, lr=0.1, steps=28)
clean("I", "shop", "rowwise", "evaluated in between", inject=_evaluated, steps=28)
clean("I", "pyramid", "mxfp8", "branches that begin at zero", inject=_zero_branches, steps=24)
clean("I", "pyramid", "blockwise", "one common class in small batches", inject=_imbalanced, steps=32)
clean("I", "pyramid", "nvfp4", "restart and ends in BF16", inject=_four_bits, steps=28)
clean("I", "beside", "tensorwise", "balanced and clipped", inject=_balanced, clip=1.0, steps=24)
clean("I", "shop", "delayed", "adapters", inject=_adapted, steps=28)
clean("I", "retention", "delayed", "resumed", inject=_resumed, steps=28)
clean("I", "retention", "guarded", "Lion", inject=_lion, steps=28)
