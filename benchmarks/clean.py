"""False alarms: `python benchmarks/clean.py [NAME ...]` trains small clean trainings and diagnoses each alone.

Every training works and is meant as it is: nothing here is a fault. So each finding is a false alarm, and each answer
that blames FP8 an accusation of the innocent. Every training runs in BF16 by torch.autocast and under recipes of FP8. A
debugger without a false alarm in n runs has a rate below 3 / n with 95 % confidence. Written to results/clean.json.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ottava
from ottava.diagnose.diagnose import diagnose

HERE = Path(__file__).resolve().parent
RECIPES = ("bf16", "tensorwise", "rowwise", "blockwise", "delayed")
CLEAN: dict[str, Callable[[Low], None]] = {}


class Low:
    """How a training computes: under autocast in BF16, or with its layers converted to a recipe.

    Args:
        recipe: "bf16", or a recipe of ottava.
    """

    def __init__(self, recipe: str) -> None:
        self.recipe = recipe

    def __call__(self, model: nn.Module) -> nn.Module:
        """The model, converted if the recipe casts."""
        if self.recipe != "bf16":
            ottava.convert(model, self.recipe)
        return model

    @contextmanager
    def cast(self) -> Iterator[None]:
        """Around a forward."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.recipe == "bf16"):
            yield


def clean(training: Callable[[Low], None]) -> Callable[[Low], None]:
    """Adds a training to the population."""
    CLEAN[training.__name__] = training
    return training


def mlp(*widths: int, act: type[nn.Module] = nn.ReLU, norm: bool = False, drop: float = 0.0) -> nn.Sequential:
    """Linear layers with activations between."""
    parts: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        parts.append(nn.Linear(a, b))
        if i < len(widths) - 2:
            parts += [nn.BatchNorm1d(b)] if norm else []
            parts += [act()]
            parts += [nn.Dropout(drop)] if drop else []
    return nn.Sequential(*parts)


class Clusters:
    """Points around centres, with their classes."""

    def __init__(self, classes: int = 8, width: int = 64, spread: float = 1.0) -> None:
        self.centres, self.spread = torch.randn(classes, width) * 1.5, spread

    def __call__(self, n: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(len(self.centres), (n,))
        return self.centres[y] + self.spread * torch.randn(n, self.centres.shape[1]), y


class Text(nn.Module):
    """A causal language model of one block."""

    def __init__(self, vocab: int = 64, width: int = 64, tied: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocab, width), nn.Embedding(64, width)
        self.n1, self.n2, self.n3 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop, self.head = nn.Dropout(drop), nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.3)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        b, t = ids.shape
        x = self.embed(ids) + self.place(torch.arange(t))
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, 4, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(a.transpose(1, 2).reshape(b, t, -1)))
        return self.head(self.n3(x + self.drop(self.down(F.gelu(self.up(self.n2(x)))))))


def sentences(n: int, t: int = 24, vocab: int = 64) -> Tensor:
    """Counting sequences with a random step: predictable from two tokens."""
    return (torch.randint(vocab, (n, 1)) + torch.randint(1, 6, (n, 1)) * torch.arange(t + 1)) % vocab


def lm_loss(model: nn.Module, low: Low, ids: Tensor, smooth: float = 0.0) -> Tensor:
    """The loss of the next token."""
    with low.cast():
        logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), label_smoothing=smooth)


def fit(low: Low, model: nn.Module, draw: Callable[[int], tuple[Tensor, Tensor]], **how: Any) -> None:
    """A plain loop over classes. how: steps, batch, lr, make (of the optimizer), clip, smooth, after (a step)."""
    low(model)
    make = how.get("make", lambda p: torch.optim.AdamW(p, lr=how.get("lr", 2e-3)))
    optimizer = make(model.parameters())
    for step in range(how.get("steps", 120)):
        x, y = draw(how.get("batch", 64))
        with low.cast():
            out = model(x)
        loss = F.cross_entropy(out.float(), y, label_smoothing=how.get("smooth", 0.0))
        optimizer.zero_grad()
        loss.backward()
        if "clip" in how:
            nn.utils.clip_grad_norm_(model.parameters(), how["clip"])
        optimizer.step()
        how.get("after", lambda *_: None)(model, optimizer, step)


# optimizers and schedules


@clean
def sgd_plain(low: Low) -> None:
    fit(low, mlp(64, 128, 128, 8), Clusters(), make=lambda p: torch.optim.SGD(p, lr=0.1))


@clean
def sgd_fast(low: Low) -> None:
    """A large rate that converges all the same."""
    fit(low, mlp(64, 128, 128, 8), Clusters(), make=lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9), clip=1.0)


@clean
def rmsprop(low: Low) -> None:
    fit(low, mlp(64, 128, 8), Clusters(), make=lambda p: torch.optim.RMSprop(p, lr=1e-3))


@clean
def adam_fast(low: Low) -> None:
    fit(low, mlp(64, 256, 256, 8), Clusters(spread=3.0), lr=1e-2)


@clean
def warm_restarts(low: Low) -> None:
    def restart(model: nn.Module, optimizer: Any, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 8e-3 * 0.5 * (1 + math.cos(math.pi * (step % 40) / 40)) + 1e-5

    fit(low, mlp(64, 128, 128, 8), Clusters(spread=4.0), steps=160, after=restart)


@clean
def one_cycle(low: Low) -> None:
    """A warm-up from almost 0, and a decay to 0."""
    schedule: list[Any] = []

    def turn(model: nn.Module, optimizer: Any, step: int) -> None:
        if not schedule:
            schedule.append(torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=130))
        schedule[0].step()

    fit(low, mlp(64, 128, 128, 8), Clusters(), after=turn)


@clean
def new_optimizer_each_task(low: Low) -> None:
    """Tasks after one another, each with an optimizer of its own: the loss jumps each time."""
    model = low(mlp(64, 128, 128, 8))
    for _ in range(4):
        draw, optimizer = Clusters(), torch.optim.Adam(model.parameters(), lr=2e-3)
        for _ in range(40):
            x, y = draw(64)
            with low.cast():
                out = model(x)
            optimizer.zero_grad()
            F.cross_entropy(out.float(), y).backward()
            optimizer.step()


# batches


@clean
def tiny_batches(low: Low) -> None:
    fit(low, mlp(64, 128, 8), Clusters(), batch=2, lr=5e-4, steps=200)


@clean
def single_samples(low: Low) -> None:
    fit(low, mlp(64, 128, 8), Clusters(), batch=1, lr=3e-4, steps=200)


@clean
def accumulates(low: Low) -> None:
    model, draw = low(mlp(64, 128, 128, 8)), Clusters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(60):
        for _ in range(4):
            x, y = draw(16)
            with low.cast():
                out = model(x)
            (F.cross_entropy(out.float(), y) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()


@clean
def one_batch(low: Low) -> None:
    """Overfits a batch on purpose."""
    draw = Clusters()
    kept = draw(32)
    fit(low, mlp(64, 128, 8), lambda n: kept, steps=80)


@clean
def bad_batch_recovers(low: Low) -> None:
    """A batch of a broken sensor: the loss jumps once and recovers."""
    draw, seen = Clusters(spread=2.0), [0]

    def some(n: int) -> tuple[Tensor, Tensor]:
        seen[0] += 1
        x, y = draw(n)
        return (x * 6, y) if seen[0] == 70 else (x, y)

    fit(low, mlp(64, 128, 8), some, clip=1.0)


@clean
def missing_values(low: Low) -> None:
    """NaN marks what was not measured; the model fills it in."""

    class Filled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fill, self.body = nn.Parameter(torch.zeros(64)), mlp(64, 128, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(torch.where(x.isnan(), self.fill, x))

    draw = Clusters()

    def some(n: int) -> tuple[Tensor, Tensor]:
        x, y = draw(n)
        return x.masked_fill(torch.rand_like(x) < 0.1, math.nan), y

    fit(low, Filled(), some)


@clean
def imbalanced(low: Low) -> None:
    """Most batches hold one class only: sorted data."""
    draw = Clusters()

    def some(n: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(8, (1,)).expand(n) if torch.rand(()) < 0.5 else torch.randint(8, (n,))
        return draw.centres[y] + torch.randn(n, 64), y.clone()

    fit(low, mlp(64, 128, 8), some, lr=1e-3)


@clean
def curriculum(low: Low) -> None:
    """Harder data at step 60: the loss jumps and stays higher."""
    easy, hard, seen = Clusters(), Clusters(spread=5.0), [0]

    def some(n: int) -> tuple[Tensor, Tensor]:
        seen[0] += 1
        return (easy if seen[0] < 60 else hard)(n)

    fit(low, mlp(64, 128, 128, 8), some)


@clean
def raw_pixels(low: Low) -> None:
    draw = Clusters()
    fit(low, nn.Sequential(nn.BatchNorm1d(64), mlp(64, 128, 8)), lambda n: ((t := draw(n))[0] * 30 + 120, t[1]))


# parts of models


@clean
def batch_norm_dropout(low: Low) -> None:
    """With an evaluation in the loop."""

    def check(model: nn.Module, optimizer: Any, step: int) -> None:
        if step % 20 == 19:
            model.eval()
            with torch.no_grad():
                model(torch.randn(64, 64))
            model.train()

    fit(low, mlp(64, 128, 128, 8, norm=True, drop=0.2), Clusters(), after=check)


@clean
def small_batch_norm(low: Low) -> None:
    """A steep start: many small classes behind a batch norm of 16 samples, SGD with momentum."""
    make = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)  # noqa: E731
    fit(low, mlp(128, 160, 128, 64, 9, norm=True), Clusters(9, 128, 0.5), batch=16, make=make, steps=150)


@clean
def smoothing(low: Low) -> None:
    fit(low, mlp(64, 128, 8), Clusters(spread=0.5), smooth=0.3, steps=150)


@clean
def frozen_trunk(low: Low) -> None:
    """A trunk that is frozen from the start, and left in the optimizer."""
    model = mlp(64, 128, 128, 8)
    for p in model[0].parameters():
        p.requires_grad_(False)
    fit(low, model, Clusters())


@clean
def frozen_later(low: Low) -> None:
    """Two phases: the trunk freezes at step 60, and the head begins anew."""

    def phase(model: nn.Module, optimizer: Any, step: int) -> None:
        if step == 60:
            for p in model[:3].parameters():
                p.requires_grad_(False)
            model[-1].reset_parameters()

    fit(low, mlp(64, 128, 128, 8), Clusters(), after=phase)


@clean
def head_only(low: Low) -> None:
    """Only the head is given to the optimizer; the trunk runs without gradients."""

    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.head = mlp(64, 128, 128), mlp(128, 64, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.trunk(x)
            return self.head(x)

    model, draw = low(Probe()), Clusters()
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=2e-3)  # type: ignore[union-attr]
    for _ in range(100):
        x, y = draw(64)
        with low.cast():
            out = model(x)
        optimizer.zero_grad()
        F.cross_entropy(out.float(), y).backward()
        optimizer.step()


@clean
def low_rank(low: Low) -> None:
    """LoRA by hand: frozen weights, an adapter that begins at zero."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a, self.b = nn.Linear(base.in_features, 16, bias=False), nn.Linear(16, base.out_features, bias=False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + 4 * self.b(self.a(x))

    model = mlp(64, 128, 128, 8)
    for i in (0, 2, 4):
        model[i] = Adapted(model[i])  # type: ignore[arg-type]
    fit(low, model, Clusters())


@clean
def experts(low: Low) -> None:
    """Two of eight experts a sample, with a loss for balance; an expert may rest for long."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.head = nn.Linear(64, 8), nn.Linear(64, 8)
            self.parts = nn.ModuleList(mlp(64, 64, 64) for _ in range(8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            weights = self.gate(x).float().softmax(-1)
            top, chosen = weights.topk(2)
            out = x.clone().float()
            for k, part in enumerate(self.parts):
                rows, slot = (chosen == k).nonzero(as_tuple=True)
                if len(rows):
                    out = out.index_add(0, rows, (part(x[rows]) * top[rows, slot, None]).float())
            return self.head(out), 8 * weights.mean(0).square().sum()

    model, draw = low(Experts()), Clusters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(120):
        x, y = draw(64)
        with low.cast():
            out, balance = model(x)
        optimizer.zero_grad()
        (F.cross_entropy(out.float(), y) + 0.01 * balance).backward()
        optimizer.step()


@clean
def sparse_embedding(low: Low) -> None:
    table = nn.Embedding(500, 64, sparse=True)
    body = low(mlp(64, 128, 8))
    sparse, dense = torch.optim.SparseAdam(table.parameters(), lr=1e-2), torch.optim.AdamW(body.parameters(), lr=2e-3)
    for _ in range(120):
        ids = torch.randint(500, (64, 4))
        with low.cast():
            out = body(table(ids).mean(1))
        sparse.zero_grad()
        dense.zero_grad()
        F.cross_entropy(out.float(), ids.sum(1) % 8).backward()
        sparse.step()
        dense.step()


@clean
def several_tasks(low: Low) -> None:
    """Two heads whose losses have other sizes; one is trained every second step."""
    trunk, one, two = low(mlp(64, 128, 128)), low(mlp(128, 64, 8)), low(mlp(128, 64, 1))
    draw = Clusters()
    parameters = [*trunk.parameters(), *one.parameters(), *two.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3)
    for step in range(120):
        x, y = draw(64)
        with low.cast():
            hidden = trunk(x)
            loss = F.cross_entropy(one(hidden).float(), y)
            if step % 2:
                loss = loss + 5 * F.mse_loss(two(hidden)[:, 0].float(), x.sum(1) / 8)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@clean
def frozen_teacher(low: Low) -> None:
    """Distillation from a network that nobody froze, because no optimizer has it."""
    teacher, model, draw = mlp(64, 256, 8), low(mlp(64, 128, 8)), Clusters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(120):
        x, _y = draw(64)
        with torch.no_grad():
            wanted = teacher(x).softmax(-1)
        with low.cast():
            out = model(x)
        optimizer.zero_grad()
        F.kl_div(out.float().log_softmax(-1), wanted, reduction="batchmean").backward()
        optimizer.step()


# language


@clean
def language(low: Low) -> None:
    model = low(Text())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        loss = lm_loss(model, low, sentences(16))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@clean
def language_tied_dropout(low: Low) -> None:
    model = low(Text(tied=True, drop=0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(120):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(step / 20, 1)  # a warm-up from 0
        loss = lm_loss(model, low, sentences(16), smooth=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@clean
def masked_language(low: Low) -> None:
    """A model that sees both sides, and learns the tokens that are hidden."""

    class Both(Text):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
            b, t, _ = x.shape
            q, k, v = self.qkv(self.n1(x)).view(b, t, 3, 4, -1).permute(2, 0, 3, 1, 4)
            x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))
            return self.head(self.n3(x + self.down(F.gelu(self.up(self.n2(x))))))

    model = low(Both(65))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        ids = sentences(32)
        hidden = torch.rand(ids.shape) < 0.15
        with low.cast():
            out = model(ids.masked_fill(hidden, 64))
        labels = ids.masked_fill(~hidden, -100)
        optimizer.zero_grad()
        F.cross_entropy(out.flatten(0, 1).float(), labels.flatten()).backward()
        optimizer.step()


@clean
def answers_only(low: Low) -> None:
    """Most labels are ignored."""
    model = low(Text())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        ids = sentences(32)
        labels = ids[:, 1:].clone()
        labels[:, :18] = -100
        with low.cast():
            out = model(ids[:, :-1])
        optimizer.zero_grad()
        F.cross_entropy(out.flatten(0, 1).float(), labels.flatten()).backward()
        optimizer.step()


@clean
def recurrent(low: Low) -> None:
    """A GRU over time-major batches: the first dimension is no batch."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.head = nn.GRU(64, 96), low(mlp(96, 96, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.gru(x)[0][-1])

    model, draw = Counts(), Clusters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(100):
        x, y = draw(16)
        with low.cast():
            out = model(torch.stack([x + torch.randn_like(x) for _ in range(16)]))
        optimizer.zero_grad()
        F.cross_entropy(out.float(), y).backward()
        optimizer.step()


@clean
def graph(low: Low) -> None:
    """Nodes that see their neighbours: a row of the output depends on other rows of the input."""

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(64, 128), nn.Linear(128, 8)

        def forward(self, x: Tensor, near: Tensor) -> Tensor:
            return self.two(near @ F.relu(self.one(near @ x)))

    model, draw = low(Graph()), Clusters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        x, y = draw(96)
        near = (y[:, None] == y).float() + (torch.rand(96, 96) < 0.02)
        with low.cast():
            out = model(x, near / near.sum(1, keepdim=True))
        optimizer.zero_grad()
        F.cross_entropy(out.float(), y).backward()
        optimizer.step()


# losses that are no cross-entropy


@clean
def adversaries(low: Low) -> None:
    """Two players: the losses swing and never fall."""
    maker, judge = low(mlp(16, 128, 128, 2)), low(mlp(2, 128, 128, 1))
    first = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.999))
    second = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.999))
    for _ in range(200):
        turn = 2 * math.pi * torch.randint(8, (64,)) / 8
        real = torch.stack([turn.cos(), turn.sin()], 1) + 0.05 * torch.randn(64, 2)
        with low.cast():
            fake = maker(torch.randn(64, 16))
            loss = F.softplus(-judge(real).float()).mean() + F.softplus(judge(fake.detach()).float()).mean()
        second.zero_grad()
        loss.backward()
        second.step()
        with low.cast():
            loss = F.softplus(-judge(maker(torch.randn(64, 16))).float()).mean()
        first.zero_grad()
        loss.backward()
        first.step()


@clean
def policy_gradient(low: Low) -> None:
    """REINFORCE: the loss is noise around zero while the reward rises."""
    policy = low(mlp(64, 128, 4))
    optimizer, secret = torch.optim.Adam(policy.parameters(), lr=5e-3), torch.randn(64, 4)
    for _ in range(150):
        state = torch.randn(32, 64)
        with low.cast():
            chances = torch.distributions.Categorical(logits=policy(state).float())
        action = chances.sample()
        reward = ((state @ secret).argmax(1) == action).float() + 0.5 * torch.randn(32)
        loss = -((reward - reward.mean()) * chances.log_prob(action)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@clean
def value_with_target(low: Low) -> None:
    """Q-learning with a target network that is an average: the loss rises as values grow."""
    model = low(mlp(64, 128, 4))
    target, reward = copy.deepcopy(model), torch.randn(64, 4) / 8
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(150):
        state, after, action = torch.randn(64, 64), torch.randn(64, 64), torch.randint(4, (64, 1))
        with torch.no_grad():
            wanted = (state @ reward).gather(1, action)[:, 0] + 0.9 * target(after).float().amax(1)
        with low.cast():
            found = model(state).gather(1, action)[:, 0]
        optimizer.zero_grad()
        F.smooth_l1_loss(found.float(), wanted).backward()
        optimizer.step()
        with torch.no_grad():
            for mine, p in zip(target.parameters(), model.parameters(), strict=True):
                mine.lerp_(p, 0.05)


@clean
def averaged(low: Low) -> None:
    """An average of the weights, evaluated in the loop by swapping it in and out."""
    model, draw = low(mlp(64, 128, 8)), Clusters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    average = [p.detach().clone() for p in model.parameters()]
    for step in range(120):
        x, y = draw(64)
        with low.cast():
            out = model(x)
        optimizer.zero_grad()
        F.cross_entropy(out.float(), y).backward()
        optimizer.step()
        with torch.no_grad():
            for mine, p in zip(average, model.parameters(), strict=True):
                mine.lerp_(p, 0.1)
            if step % 30 == 29:
                kept = [p.clone() for p in model.parameters()]
                for p, mine in zip(model.parameters(), average, strict=True):
                    p.copy_(mine)
                model.eval()(draw(64)[0])
                model.train()
                for p, mine in zip(model.parameters(), kept, strict=True):
                    p.copy_(mine)


@clean
def clamped(low: Low) -> None:
    """A critic whose weights are clamped after each step."""

    def clamp(model: nn.Module, optimizer: Any, step: int) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.1, 0.1)

    fit(low, mlp(64, 128, 8), Clusters(), after=clamp)


@clean
def autoencoder(low: Low) -> None:
    """A variational one: the weight of the divergence grows, and the loss with it."""

    class Variational(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.back = mlp(64, 128, 32), mlp(16, 128, 64)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            mean, log = self.into(x).float().chunk(2, -1)
            z = mean + torch.randn_like(mean) * (log / 2).exp()
            return self.back(z), 0.5 * (mean**2 + log.exp() - 1 - log).sum(1).mean()

    model, draw = low(Variational()), Clusters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(160):
        x, _y = draw(64)
        with low.cast():
            out, gap = model(x)
        loss = (out.float() - x).square().sum(1).mean() + min(1.0, max(0, step - 60) / 40) * gap
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@clean
def contrastive(low: Low) -> None:
    """Pairs against all others of the batch, with a learned temperature."""
    one, two, heat = low(mlp(64, 128, 64)), low(mlp(64, 128, 64)), nn.Parameter(torch.tensor(2.0))
    draw = Clusters(64)
    optimizer = torch.optim.AdamW([*one.parameters(), *two.parameters(), heat], lr=1e-3)
    for _ in range(120):
        x, _y = draw(64)
        with low.cast():
            a, b = one(x), two(x + 0.3 * torch.randn_like(x))
        scores = heat.exp() * F.normalize(a.float(), dim=1) @ F.normalize(b.float(), dim=1).t()
        labels = torch.arange(64)
        optimizer.zero_grad()
        ((F.cross_entropy(scores, labels) + F.cross_entropy(scores.t(), labels)) / 2).backward()
        optimizer.step()


@clean
def denoises(low: Low) -> None:
    """Noise levels over four decades, as in diffusion: losses of single steps differ much."""
    model, draw = low(mlp(65, 256, 256, 64, act=nn.SiLU)), Clusters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(150):
        x, _y = draw(32)
        level = torch.exp(2.3 * torch.randn(32, 1))
        noise = torch.randn_like(x)
        with low.cast():
            out = model(torch.cat([(x + level * noise) / (1 + level), level.log() / 4], 1))
        optimizer.zero_grad()
        F.mse_loss(out.float(), noise).backward()
        optimizer.step()


@clean
def ranking(low: Low) -> None:
    """Every pair of a batch: (N, 1) and (1, N) make (N, N) on purpose."""
    model, secret = low(mlp(64, 128, 1)), torch.randn(64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(100):
        x = torch.randn(48, 64)
        with low.cast():
            score = model(x)[:, 0].float()
        better = (x @ secret)[:, None] > (x @ secret)[None]
        loss = F.softplus(-(score.unsqueeze(1) - score.unsqueeze(0)))[better].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@clean
def plateau(low: Low) -> None:
    """Parity of four bits: flat for long, as hard tasks are."""
    model = low(mlp(16, 128, 128, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(150):
        x = torch.randint(2, (64, 16)).float()
        with low.cast():
            out = model(2 * x - 1)
        optimizer.zero_grad()
        F.cross_entropy(out.float(), x[:, :4].sum(1).long() % 2).backward()
        optimizer.step()


@clean
def scaled_half(low: Low) -> None:
    """A GradScaler that begins too high and skips steps."""
    model, draw = low(mlp(64, 128, 8)), Clusters()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=2e-3), torch.amp.GradScaler("cpu", init_scale=2.0**126)
    for _ in range(100):
        x, y = draw(64)
        with low.cast():
            out = model(x)
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(out.float(), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@clean
def bf16_weights(low: Low) -> None:
    """Weights in BF16 without masters, at a rate that moves them."""
    if low.recipe != "bf16":
        sgd_plain(low)
        return
    model, draw = mlp(64, 128, 128, 8).bfloat16(), Clusters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(120):
        x, y = draw(64)
        optimizer.zero_grad()
        F.cross_entropy(model(x.bfloat16()), y).backward()
        optimizer.step()


@clean
def sharpness_aware(low: Low) -> None:
    """SAM: the weights climb, the gradient is taken there, and they come back before the step."""
    model, draw = low(mlp(64, 128, 8)), Clusters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(100):
        x, y = draw(64)
        F.cross_entropy(model(x).float(), y).backward()
        with torch.no_grad():
            moves = [0.05 * p.grad / 1.0 for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        F.cross_entropy(model(x).float(), y).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()


def trained(name: str, recipe: str, folder: Path, seed: int = 0) -> Any:
    """The diagnosis of one clean training.

    Args:
        name: of `CLEAN`.
        recipe: of `RECIPES`.
        folder: for the run.
        seed: of torch.
    """
    torch.manual_seed(seed)
    with ottava.watch(None, folder):
        CLEAN[name](Low(recipe))
    return diagnose(ottava.debug.Run.open(folder))


def main() -> int:
    """Trains and diagnoses, and writes what was said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="trainings; none: all")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=RECIPES)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for name in options.names or CLEAN:
        for recipe in options.recipes:
            began = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                said = trained(name, recipe, Path(folder) / "run", options.seed)
            one = {"training": name, "recipe": recipe, "alarm": bool(said.findings), "fp8": said.fp8}
            one |= {"sentence": said.sentence, "seconds": round(time.perf_counter() - began, 1)}
            results.append(one)
            print("ALARM" if one["alarm"] else "quiet", name, recipe, said.sentence[:330], flush=True)
    alarms, accused = sum(r["alarm"] for r in results), sum(r["fp8"] == "guilty" for r in results)
    print(f"{len(results)} clean runs: {alarms} alarms, {accused} accusations of FP8")
    if not options.names:
        about = {"runs": len(results), "alarms": alarms, "accusations": accused, "seed": options.seed}
        text = json.dumps({**about, "results": results}, indent=1) + "\n"
        (HERE / "results" / "clean.json").write_text(text, encoding="utf-8")
    return int(alarms + accused > 0)


if __name__ == "__main__":
    sys.exit(main())
