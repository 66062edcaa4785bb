"""Models for sets C and D: a diffusion transformer, a gated recurrence, two towers, a ranking model,
adapters on a frozen GPT, torch's own encoder, and a GPT whose MLP multiplies parameters itself.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from models import BLOCKS, MODELS, TOKENS, VOCABULARY, WIDTH, Attention, Feed, Net, make_batch
from torch import Tensor, nn

PIXELS, DENSE, TABLES = 12, 16, 4


class Modulated(nn.Module):
    """A block whose norms are scaled and shifted by a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixer, self.mlp = Attention(WIDTH, causal=False, fused=True), Feed(WIDTH, "gelu")
        self.modulation = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        a, b, c, d = self.modulation(F.silu(condition))[:, None].chunk(4, -1)
        x = x + self.mixer(self.norm1(x) * (1 + a) + b)
        return x + self.mlp(self.norm2(x) * (1 + c) + d)


class Diffusion(nn.Module):
    """Tells noise from patches and a time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.time = nn.Linear(PIXELS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(TOKENS, WIDTH))
        self.blocks = nn.ModuleList(Modulated() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, PIXELS)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        waves = time[:, None] * torch.exp(torch.arange(WIDTH) * -0.2)
        condition = self.time(waves.sin())
        x = self.embed(x) + self.position
        for block in self.blocks:
            x = block(x, condition)
        return self.head(self.norm(x))


class Recurrence(nn.Module):
    """A gated running mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.in_proj = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.decay, self.out_proj = nn.Parameter(torch.linspace(-1, 3, 2 * WIDTH)), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.in_proj(self.norm(x)).chunk(2, -1)
        keep, states = torch.sigmoid(self.decay), [torch.zeros_like(value[:, 0], dtype=torch.float32)]
        for token in value.float().unbind(1):
            states.append(keep * states[-1] + (1 - keep) * token)
        return x + self.out_proj(torch.stack(states[1:], 1).to(gate.dtype) * F.silu(gate))


class Recurrent(nn.Module):
    """Language model of recurrences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Recurrence() for _ in range(4))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Towers(nn.Module):
    """Pairs images with texts."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(32, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, 2 * WIDTH), nn.GELU(),
                                   nn.Linear(2 * WIDTH, WIDTH))  # fmt: skip
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.text = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        one, other = self.image(image), self.text(self.words(ids).mean(1))
        return self.scale.exp() * F.normalize(one.float(), dim=-1) @ F.normalize(other.float(), dim=-1).t()


class Ranking(nn.Module):
    """Clicks from dense features and tables."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.tables = nn.ModuleList(nn.Embedding(100, 16) for _ in range(TABLES))
        self.top = nn.Sequential(
            nn.Linear(32 + 16 * TABLES, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 16)
        )
        self.head = nn.Linear(16, 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        found = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return self.head(F.relu(self.top(torch.cat([self.bottom(dense), *found], -1))))


class Adapter(nn.Module):
    """A frozen linear with a low-rank addition that begins at 0."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 16, bias=False), nn.Linear(16, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(self.down(x))


def adapted() -> Any:
    """A frozen GPT with adapters."""
    model = Net("gpt").requires_grad_(False)
    for block in model.blocks:
        for owner, name in ((block.mixer, "q"), (block.mixer, "v"), (block.mlp, "fc1"), (block.mlp, "fc2")):
            setattr(owner, name, Adapter(getattr(owner, name)))
    return model


class Encoder(nn.Module):
    """torch's own encoder as a causal language model."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(0.1 * torch.randn(TOKENS, WIDTH))
        self.encoder = nn.TransformerEncoder(layer, BLOCKS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        causal = torch.full((ids.shape[1], ids.shape[1]), float("-inf")).triu(1)
        x = self.embed(ids) + self.position
        return self.head(self.encoder(x, mask=causal, src_key_padding_mask=padding))


class RawFeed(nn.Module):
    """An MLP that multiplies parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4 * WIDTH, WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) * (4 * WIDTH) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.up)), self.down)


def raw() -> Any:
    """A GPT with such MLPs."""
    model = Net("gpt")
    for block in model.blocks:
        block.mlp = RawFeed()
    return model


def noisy_patches(generator: torch.Generator) -> list[Tensor]:
    """Patches with noise, the time, the noise."""
    clean = torch.randn(4, TOKENS, PIXELS, generator=torch.Generator().manual_seed(3)).repeat(4, 1, 1)
    noise, time = torch.randn(clean.shape, generator=generator), torch.rand(16, generator=generator)
    return [(1 - time[:, None, None]) * clean + time[:, None, None] * noise, 10 * time, noise]


def pairs(generator: torch.Generator) -> list[Tensor]:
    """Images, words, and the number of the pair."""
    kind = torch.randperm(32, generator=generator)[:16]
    templates = torch.randn(32, 32, generator=torch.Generator().manual_seed(4))
    words = torch.stack([kind, kind + 32, torch.randint(0, 64, (16,), generator=generator)], 1)
    return [templates[kind] + 0.3 * torch.randn(16, 32, generator=generator), words, torch.arange(16)]


def clicks(generator: torch.Generator) -> list[Tensor]:
    """Dense features, ids, whether somebody clicked."""
    dense, ids = torch.randn(64, DENSE, generator=generator), torch.randint(0, 100, (64, TABLES), generator=generator)
    chance = torch.sigmoid(dense[:, :3].sum(1) + (ids[:, 0] % 5 - 2.0))
    return [dense, ids, (torch.rand(64, generator=generator) < chance).float()]


def squared(y: Tensor, target: Tensor) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(y.float(), target.float())


def clicked(y: Tensor, labels: Tensor) -> Tensor:
    """Binary cross-entropy."""
    return F.binary_cross_entropy_with_logits(y.float().squeeze(-1), labels.float())


MODELS |= {
    "dit": (Diffusion, noisy_patches, squared),
    "ssm": (Recurrent, partial(make_batch, "gpt"), None),
    "clip": (Towers, pairs, None),
    "dlrm": (Ranking, clicks, clicked),
    "lora": (adapted, partial(make_batch, "gpt"), None),
    "torch": (Encoder, partial(make_batch, "gpt"), None),
    "raw": (raw, partial(make_batch, "gpt"), None),
}
