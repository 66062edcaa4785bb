"""Clean trainings, first part: optimizers and schedules, batches, parts of models. See clean.py."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ottava

CLEAN: dict[str, Callable[[Low], None]] = {}
"""Name -> training."""


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


def take(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """A step."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


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
    model = mlp(64, 128, 128, 8)
    for _ in range(4):
        fit(low, model, Clusters(), steps=40, make=lambda p: torch.optim.Adam(p, lr=2e-3))


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

    model = Probe()
    fit(low, model, Clusters(), steps=100, make=lambda _: torch.optim.AdamW(model.head.parameters(), lr=2e-3))


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
        take(optimizer, F.cross_entropy(out.float(), y) + 0.01 * balance)


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
        take(optimizer, loss)


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
        take(optimizer, F.kl_div(out.float().log_softmax(-1), wanted, reduction="batchmean"))
