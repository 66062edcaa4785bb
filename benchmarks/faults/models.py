"""Small models, and a training run of one under the watch; see run.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ottava
from ottava.recipe import Recipe, get_recipe
from ottava.watching.session import watch

WIDTH, BLOCKS, VOCABULARY, TOKENS, BATCH, CLASSES = 48, 3, 64, 16, 8, 10


class Attention(nn.Module):
    """Self- or cross-attention with separate projections."""

    def __init__(self, width: int, *, causal: bool, fused: bool = False) -> None:
        super().__init__()
        self.causal, self.fused = causal, fused
        if fused:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        source = x if memory is None else memory
        q, k, v = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(source), self.v(source))
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal and memory is None)
        return self.proj(y.transpose(1, 2).flatten(2))


class Feed(nn.Module):
    """FC1, an activation, FC2; or SwiGLU."""

    def __init__(self, width: int, act: str, inner: int = 0) -> None:
        super().__init__()
        self.act, inner = act, inner or 4 * width
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)
        if act == "swiglu":
            self.gate = nn.Linear(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        if self.act == "swiglu":
            return self.fc2(F.silu(self.gate(x)) * self.fc1(x))
        return self.fc2(F.relu(self.fc1(x)) if self.act == "relu" else F.gelu(self.fc1(x)))


class Experts(nn.Module):
    """The best of four, by a router."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(Feed(width, "gelu", 2 * width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        gates = self.router(flat).softmax(-1)
        best, choice = gates.max(-1)
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows = (choice == i).nonzero().squeeze(1)
            if len(rows):
                y = y.index_add(0, rows, (expert(flat[rows]) * best[rows, None].to(flat.dtype)).to(y.dtype))
        return y.view_as(x)


class Mixing(nn.Module):
    """An MLP over tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.mlp = Feed(tokens, "gelu", 2 * tokens)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x.transpose(1, 2)).transpose(1, 2)


class Block(nn.Module):
    """Norm, mixer, norm, MLP on a residual stream; a decoder has cross-attention between."""

    def __init__(
        self, mixer: nn.Module, feed: nn.Module, norm: type[nn.Module], cross: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.norm1, self.mixer, self.norm2, self.mlp = norm(WIDTH), mixer, norm(WIDTH), feed
        if cross is not None:
            self.norm3, self.cross = norm(WIDTH), cross

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        if memory is not None:
            x = x + self.cross(self.norm3(x), memory)
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    """Tokens or patches, blocks, a head. The kind decides what is in a block."""

    def __init__(self, kind: str, *, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.kind, image = kind, kind in ("vit", "mixer")
        norm: Any = nn.RMSNorm if kind == "llama" else nn.LayerNorm
        act = {"llama": "swiglu", "encdec": "relu"}.get(kind, "gelu")

        def block() -> Block:
            mixer = Mixing(TOKENS) if kind == "mixer" else Attention(WIDTH, causal=not image, fused=kind == "vit")
            feed = Experts(WIDTH) if kind == "moe" else Feed(WIDTH, act)
            return Block(mixer, feed, norm, Attention(WIDTH, causal=False) if kind == "encdec" else None)

        self.embed: nn.Module = nn.Linear(12, WIDTH) if image else nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(TOKENS, WIDTH))
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))
        if kind == "encdec":
            self.encoder = nn.ModuleList(
                Block(Attention(WIDTH, causal=False), Feed(WIDTH, act), norm) for _ in range(2)
            )
        self.norm = norm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES if image else VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=WIDTH**-0.5 if isinstance(module, nn.Linear) else 0.5)
        if tied:
            self.head.weight = self.embed.weight  # type: ignore[assignment]

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        memory = None
        if source is not None:
            memory = self.embed(source) + self.position
            for layer in self.encoder:
                memory = layer(memory)
        x = self.drop(self.embed(x) + self.position[: x.shape[1]])
        for layer in self.blocks:
            x = layer(x, memory)
        x = self.norm(x)
        return self.head(x.mean(1) if self.kind in ("vit", "mixer") else x)


def make_batch(kind: str, generator: torch.Generator) -> list[Tensor]:
    """Inputs, then labels: sequences that count up, with surprises; or noisy templates."""
    if kind in ("vit", "mixer"):
        templates = torch.randn(CLASSES, TOKENS, 12, generator=torch.Generator().manual_seed(3))
        labels = torch.randint(0, CLASSES, (4 * BATCH,), generator=generator)
        return [templates[labels] + 0.5 * torch.randn(4 * BATCH, TOKENS, 12, generator=generator), labels]
    start = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
    ids = (start + stride * torch.arange(TOKENS + 1)) % VOCABULARY
    surprise = torch.rand(ids.shape, generator=generator) < 0.1
    ids = torch.where(surprise, torch.randint(0, VOCABULARY, ids.shape, generator=generator), ids)
    inputs = [ids[:, :-1]] if kind != "encdec" else [ids[:, :-1], ids[:, 1:].flip(1)]
    return [*inputs, ids[:, 1:]]


MODELS: dict[str, tuple[Callable[[], Any], Callable[[torch.Generator], list[Tensor]], Any]] = {}
"""Kind -> model, batch and loss of kinds that another file adds; a loss of None is cross-entropy."""


@dataclass
class Lab:
    """A training run that a fault changes before it begins."""

    model: Any
    recipe: str | Recipe
    twin: bool = False
    """Whether this is the BF16 twin: not converted."""
    lr: float = 3e-3
    steps: int = 16
    step: int = 0
    seed: int = 0
    bf16: bool = False
    """BF16 weights in place of autocast."""
    clip: float = 0.0
    zero_grad: bool = True
    accumulate: int = 1
    every: int = 2
    optimizer: Any = None
    make_optimizer: Callable[[Any, float], Any] = lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr)
    parameters: Callable[[Any], Any] = lambda model: model.parameters()
    convert: Callable[[Any, Any], Any] = ottava.convert
    watch_settings: dict[str, Any] = field(default_factory=dict)
    before_step: list[Callable[[], None]] = field(default_factory=list)
    after_backward: list[Callable[[], None]] = field(default_factory=list)
    after_step: list[Callable[[], None]] = field(default_factory=list)
    change_batch: Callable[[list[Tensor]], list[Tensor]] = lambda batch: batch
    change_loss: Callable[[Tensor], Tensor] = lambda loss: loss
    loss_of: Callable[[Tensor, Tensor], Tensor] = lambda y, labels: F.cross_entropy(
        y.float().flatten(0, -2), labels.flatten()
    )

    def layer(self, name: str) -> Any:
        """A layer by its name."""
        return self.model.get_submodule(name)

    def generator(self, offset: int = 0) -> torch.Generator:
        """For what a fault draws."""
        return torch.Generator().manual_seed(11 + offset + 1000 * self.seed)

    def change_input(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """The layer's input is another one from now on; backward goes through the change."""
        self.layer(name).register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))

    def change_gradient(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """The gradient of the layer's output is another one."""

        def hook(_: Any, __: Any, y: Tensor) -> None:
            if y.requires_grad:
                y.register_hook(change)

        self.layer(name).register_forward_hook(hook)


def run(
    folder: Path, kind: str, recipe: str | Recipe, inject: Callable[[Lab], None] | None, *, seed: int = 0,
    twin: bool = False, remedy: Callable[[Any], Any] | None = None, **options: Any,
) -> float:  # fmt: skip
    """Trains under the watch; the last loss. `remedy` changes the recipe of a run that is repeated."""
    torch.manual_seed(seed)
    made, batch, loss_of = MODELS.get(kind, (None, partial(make_batch, kind), None))
    net = made() if made else Net(kind, tied=options.pop("tied", False), dropout=options.pop("dropout", 0.0))
    lab = Lab(net, recipe, twin, seed=seed)
    lab.loss_of = loss_of or lab.loss_of
    for name, value in options.items():
        setattr(lab, name, value)
    if inject is not None:
        inject(lab)
    if lab.bf16:
        lab.model.bfloat16()
    if remedy is not None:
        lab.recipe = remedy(lab)
    if not twin and get_recipe(lab.recipe).name != "bf16":
        lab.convert(lab.model, lab.recipe)
    lab.optimizer = lab.make_optimizer(lab.parameters(lab.model), lab.lr)
    generator = torch.Generator().manual_seed(100 + seed)
    loss = torch.tensor(math.nan)
    with watch(lab.model, folder, every=lab.every, **lab.watch_settings):
        for step in range(1, lab.steps + 1):
            lab.step = step
            for action in lab.before_step:
                action()
            for _ in range(lab.accumulate):
                *inputs, labels = lab.change_batch(batch(generator))
                if lab.bf16:
                    inputs = [x.bfloat16() if x.is_floating_point() else x for x in inputs]
                with nullcontext() if lab.bf16 else torch.autocast("cpu", torch.bfloat16):
                    y = lab.model(*inputs)
                loss = lab.change_loss(lab.loss_of(y, labels) / lab.accumulate)
                loss.backward()
            for action in lab.after_backward:
                action()
            if lab.clip:
                nn.utils.clip_grad_norm_(lab.model.parameters(), lab.clip)
            lab.optimizer.step()
            if lab.zero_grad:
                lab.optimizer.zero_grad()
            for action in lab.after_step:
                action()
    return float(loss.detach())
