"""Models for set E: a ConvNet with MLPs, a Perceiver, grouped queries with rotations, latent
attention, parallel blocks, BERT with its norms behind, a masked autoencoder, an LSTM, a U of blocks, shared experts.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from models import BATCH, CLASSES, MODELS, TOKENS, VOCABULARY, WIDTH, Attention, Feed, make_batch
from torch import Tensor, nn

MASK, PIXELS, FEATURES, COORDINATES = VOCABULARY - 1, 48, 32, 32


class Residual(nn.Module):
    """Batch norm and an MLP beside the stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.BatchNorm1d(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.relu(self.fc1(self.norm(x))))


class Convolutional(nn.Module):
    """Two convolutions, residual MLPs, and one head for classes and coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
                                  nn.Conv2d(16, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten())  # fmt: skip
        self.reduce = nn.Linear(256, 96)
        self.blocks = nn.ModuleList(Residual(96) for _ in range(3))
        self.head = nn.Linear(96, 32 + COORDINATES)

    def forward(self, image: Tensor) -> Tensor:
        x = self.reduce(self.stem(image))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Perceiver(nn.Module):
    """Eight latents that read the inputs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.latents = nn.Linear(FEATURES, WIDTH), nn.Parameter(torch.randn(8, WIDTH))
        self.reads = nn.ModuleList(Attention(WIDTH, causal=False) for _ in range(2))
        self.thinks = nn.ModuleList(Attention(WIDTH, causal=False) for _ in range(2))
        self.mlps = nn.ModuleList(Feed(WIDTH, "relu") for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.embed(x)
        y = self.latents.expand(len(x), -1, -1)
        for i, (read, think, mlp) in enumerate(zip(self.reads, self.thinks, self.mlps, strict=True)):
            y = y + read(self.norms[3 * i](y), memory)
            y = y + think(self.norms[3 * i + 1](y))
            y = y + mlp(self.norms[3 * i + 2](y))
        return self.head(y.mean(1))


def rotated(x: Tensor) -> Tensor:
    """Rotary positions; (batch, heads, tokens, features)."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[2])[:, None] * 100.0 ** (-torch.arange(half) / half)
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).to(x.dtype)


class Grouped(nn.Module):
    """Four heads of queries, two of keys and values; queries and keys are normalized and rotated."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // 4
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * size), nn.Linear(WIDTH, 2 * size)
        self.q_norm, self.k_norm, self.proj = nn.RMSNorm(size), nn.RMSNorm(size), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (n, -1)).transpose(1, 2) for f, n in ((self.q, 4), (self.k, 2), (self.v, 2)))
        q, k = rotated(self.q_norm(q)).to(v.dtype), rotated(self.k_norm(k)).to(v.dtype)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Latent(nn.Module):
    """Keys and values from a narrow latent; the weights of attention by its own arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv_down, self.kv_norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 32), nn.RMSNorm(32)
        self.kv_up, self.proj, self.sharpness = nn.Linear(32, 2 * WIDTH), nn.Linear(WIDTH, WIDTH), 1.0
        self.stable = True

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.kv_up(self.kv_norm(self.kv_down(x))).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2).float() for t in (self.q(x), k, v))
        scores = self.sharpness * q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), float("-inf"))
        shares = (scores - scores.amax(-1, keepdim=True) if self.stable else scores).exp()
        y = shares / shares.sum(-1, keepdim=True) @ v
        return self.proj(y.transpose(1, 2).flatten(2).to(x.dtype))


class Shared(nn.Module):
    """One expert for all tokens beside the best of four."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.shared = nn.Linear(WIDTH, 4), Feed(WIDTH, "gelu", 96)
        self.experts = nn.ModuleList(Feed(WIDTH, "gelu", 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        best, choice = self.router(flat).float().softmax(-1).max(-1)
        y = self.shared(flat).float()
        for i, expert in enumerate(self.experts):
            rows = (choice == i).nonzero().squeeze(1)
            if len(rows):
                y = y.index_add(0, rows, expert(flat[rows]).float() * best[rows, None])
        return y.view_as(x)


class Before(nn.Module):
    """Norms before the mixer and the MLP, which follow each other or run in parallel."""

    def __init__(self, mixer: nn.Module, feed: nn.Module, *, parallel: bool = False) -> None:
        super().__init__()
        self.norm1, self.mixer, self.mlp, self.parallel = nn.RMSNorm(WIDTH), mixer, feed, parallel
        self.gain = nn.Parameter(torch.ones(WIDTH))
        if not parallel:
            self.norm2 = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        if self.parallel:
            return x + self.gain * (self.mixer(y) + self.mlp(y))
        x = x + self.gain * self.mixer(y)
        return x + self.gain * self.mlp(self.norm2(x))


class Behind(nn.Module):
    """Norms behind the sums, as BERT has them."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.mlp = Attention(WIDTH, causal=False), Feed(WIDTH, "gelu")
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.mixer(x))
        return self.norm2(x + self.mlp(x))


class Language(nn.Module):
    """Tokens, blocks, a head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(0.1 * torch.randn(TOKENS, WIDTH))
        nn.init.normal_(self.embed.weight, std=WIDTH**-0.5 if kind == "bert" else 0.5)
        block = {
            "gqa": lambda: Before(Grouped(), Feed(WIDTH, "swiglu", 96)),
            "mla": lambda: Before(Latent(), Feed(WIDTH, "swiglu", 96)),
            "gptj": lambda: Before(Attention(WIDTH, causal=True), Feed(WIDTH, "gelu"), parallel=True),
            "shared": lambda: Before(Attention(WIDTH, causal=True), Shared()),
            "bert": Behind,
        }[kind]
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.norm = nn.Identity() if kind == "bert" else nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if kind == "bert":
            self.head.weight = self.embed.weight  # type: ignore[assignment]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Masked(nn.Module):
    """Sees half of the patches and paints all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Linear(PIXELS, WIDTH), nn.Parameter(0.1 * torch.randn(TOKENS, WIDTH))
        self.mask = nn.Parameter(torch.zeros(WIDTH))
        self.encoder, self.decoder = (
            nn.ModuleList(Before(Attention(WIDTH, causal=False, fused=True), Feed(WIDTH, "gelu")) for _ in range(2))
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, PIXELS)

    def forward(self, patches: Tensor, seen: Tensor) -> Tensor:
        where = seen[..., None].expand(-1, -1, WIDTH)
        x = (self.embed(patches) + self.position).gather(1, where)
        for block in self.encoder:
            x = block(x)
        y = self.mask.expand(len(x), TOKENS, WIDTH).to(x.dtype).scatter(1, where, x) + self.position
        for block in self.decoder:
            y = block(y)
        return self.head(self.norm(y))


class Remembering(nn.Module):
    """Two layers of LSTM made of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.inputs = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(2))
        self.states = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.out, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for given, kept in zip(self.inputs, self.states, strict=True):
            state, cell, ys = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), []
            for token in given(x).unbind(1):
                i, f, o, new = (token + kept(state)).float().chunk(4, -1)
                cell = torch.sigmoid(f + 1) * cell + torch.sigmoid(i) * torch.tanh(new)
                state = torch.sigmoid(o) * torch.tanh(cell)
                ys.append(state)
            x = torch.stack(ys, 1)
        return self.head(F.gelu(self.out(x)))


class Shaped(nn.Module):
    """A U: pairs of tokens are merged, parted again, and joined with what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(0.1 * torch.randn(TOKENS, WIDTH))

        def block() -> Before:
            return Before(Attention(WIDTH, causal=False, fused=True), Feed(WIDTH, "gelu"))

        self.down, self.middle, self.up = block(), block(), block()
        self.merge, self.part = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.join, self.norm = nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        before = self.down(self.embed(ids) + self.position)
        inner = self.middle(self.merge(before.unflatten(1, (-1, 2)).flatten(2)))
        after = self.part(inner).unflatten(-1, (2, -1)).flatten(1, 2)
        return self.head(self.norm(self.up(self.join(torch.cat([after, before.to(after.dtype)], -1)))))


def photographs(generator: torch.Generator) -> list[Tensor]:
    """Images; a class and the coordinates that go with it."""
    fixed = torch.Generator().manual_seed(5)
    templates, places = torch.randn(32, 3, 8, 8, generator=fixed), torch.randn(32, COORDINATES, generator=fixed)
    kind = torch.randint(0, 32, (48,), generator=generator)
    image = templates[kind] + 0.5 * torch.randn(48, 3, 8, 8, generator=generator)
    return [image, torch.cat([kind[:, None].float(), places[kind]], 1)]


def class_and_place(y: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the class, squared error of the coordinates."""
    classes, places = y.float().split([32, COORDINATES], 1)
    return F.cross_entropy(classes, labels[:, 0].long()) + 0.1 * F.mse_loss(places, labels[:, 1:])


def signals(generator: torch.Generator) -> list[Tensor]:
    """Sequences of features of ten kinds."""
    templates = torch.randn(CLASSES, 24, FEATURES, generator=torch.Generator().manual_seed(6))
    labels = torch.randint(0, CLASSES, (32,), generator=generator)
    return [templates[labels] + 0.7 * torch.randn(32, 24, FEATURES, generator=generator), labels]


def masked_words(generator: torch.Generator) -> list[Tensor]:
    """Sequences in which every fourth token or so is hidden; labels only there."""
    ids = make_batch("gpt", generator)[0] % MASK
    hidden = torch.rand(ids.shape, generator=generator) < 0.25
    return [ids.masked_fill(hidden, MASK), ids.masked_fill(~hidden, -100)]


def corrupted_words(generator: torch.Generator) -> list[Tensor]:
    """Sequences with wrong tokens among them; the right ones."""
    start = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
    ids = (start + torch.arange(TOKENS)) % VOCABULARY
    wrong = torch.rand(ids.shape, generator=generator) < 0.15
    return [torch.where(wrong, torch.randint(0, VOCABULARY, ids.shape, generator=generator), ids), ids]


def half_seen(generator: torch.Generator) -> list[Tensor]:
    """Patches, the numbers of the seen ones, patches."""
    templates = torch.randn(CLASSES, TOKENS, PIXELS, generator=torch.Generator().manual_seed(7))
    kind = torch.randint(0, CLASSES, (16,), generator=generator)
    patches = templates[kind] + 0.3 * torch.randn(16, TOKENS, PIXELS, generator=generator)
    return [patches, torch.rand(16, TOKENS, generator=generator).argsort(1)[:, : TOKENS // 2], patches]


def squared(y: Tensor, target: Tensor) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(y.float(), target.float())


MODELS |= {
    "convnet": (Convolutional, photographs, class_and_place),
    "perceiver": (Perceiver, signals, None),
    "mae": (Masked, half_seen, squared),
    "lstm": (Remembering, partial(make_batch, "gpt"), None),
    "unet": (Shaped, corrupted_words, None),
    "bert": (partial(Language, "bert"), masked_words, None),
    **{kind: (partial(Language, kind), partial(make_batch, "gpt"), None) for kind in ("gqa", "mla", "gptj", "shared")},
}
