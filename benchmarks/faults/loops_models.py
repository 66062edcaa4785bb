"""Models for set G: packed documents with or without recomputation, preferences, a teacher that is a
moving average, a policy with a value, a variational autoencoder, graphs, sets.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.nn.functional as F
from models import BATCH, CLASSES, MODELS, VOCABULARY, WIDTH, make_batch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SEPARATOR, LONGEST = 0, 64


class Mixing(nn.Module):
    """Attention under a mask and GEGLU, each behind an RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def feed(self, x: Tensor) -> Tensor:
        a, b = self.up(x).chunk(2, -1)
        return self.down(F.gelu(a) * b)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.feed(self.norm2(x))


class Packed(nn.Module):
    """A language model for packed documents, with or without recomputation."""

    recompute = False
    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(0.1 * torch.randn(LONGEST, WIDTH))
        self.blocks = nn.ModuleList(Mixing() for _ in range(3))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.5)

    def forward(self, ids: Tensor) -> Tensor:
        separators = ids == SEPARATOR
        document = separators.cumsum(1)
        tokens = ids.shape[1]
        allowed = torch.ones(tokens, tokens).tril().bool() & (document[:, :, None] == document[:, None, :])
        allowed = ((allowed & ~separators[:, None, :]) | torch.eye(tokens).bool())[:, None]
        x = self.embed(ids) + self.position[:tokens]
        for block in self.blocks:
            x = checkpoint(block, x, allowed, use_reentrant=self.reentrant) if self.recompute else block(x, allowed)
        return self.head(self.norm(x))


class Recomputed(Packed):
    """Keeps no activation of a block."""

    recompute = True


class Preferring(nn.Module):
    """How much more a policy prefers one answer to another than its frozen origin does."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Packed()
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        def score(model: nn.Module, ids: Tensor) -> Tensor:
            logits = model(ids[:, :-1]).float()
            return -F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").sum(1)

        own = score(self.policy, chosen) - score(self.policy, rejected)
        with torch.no_grad():
            old = score(self.reference, chosen) - score(self.reference, rejected)
        return own - old


class Taught(nn.Module):
    """A student tells the class and the features of a teacher, which is its own moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, WIDTH))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.guess, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        with torch.no_grad():
            for kept, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                kept.lerp_(new, 0.05)
            aim = self.teacher(other).float()
        y = self.student(x)
        return torch.cat([self.head(y).float(), F.normalize(self.guess(y).float()), F.normalize(aim)], 1)


class Deciding(nn.Module):
    """A trunk, a policy, and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU())
        self.policy = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, CLASSES))
        self.value = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.trunk(x)
        return torch.cat([self.policy(y), self.value(y)], 1)


class Variational(nn.Module):
    """An autoencoder with noise in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 96), nn.GELU())
        self.mean, self.spread = nn.Linear(96, 32), nn.Linear(96, 32)
        self.decoder = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.encoder(x)
        mean, spread = self.mean(y).float(), self.spread(y).float() - 3
        middle = mean + (0.5 * spread).exp() * torch.randn_like(mean)
        return torch.cat([self.decoder(middle).float(), mean, spread], 1)


class Graphs(nn.Module):
    """Messages between neighbours, then the sum over the nodes."""

    mean = True

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 64)
        self.own, self.others = (nn.ModuleList(nn.Linear(64, 64) for _ in range(3)) for _ in range(2))
        self.out, self.head = nn.Linear(64, 64), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        if self.mean:
            edges = edges / edges.sum(-1, keepdim=True).clamp(min=1)
        x = self.embed(x)
        for own, others in zip(self.own, self.others, strict=True):
            x = F.relu(own(x) + others((edges @ x.float()).to(x.dtype))) + x
        return self.head(F.relu(self.out(x.float().mean(1) if self.mean else x.float().sum(1))))


class Sets(nn.Module):
    """A sum over members, however many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64))
        self.whole = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU())
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.whole(self.each(x).float().sum(1)))


def documents(generator: torch.Generator) -> list[Tensor]:
    """Short documents one after the other, with separators whose labels are ignored."""
    first, labels = make_batch("gpt", generator)
    second, more = make_batch("gpt", generator)
    ids, labels = torch.cat([first, second], 1).clamp(min=1), torch.cat([labels, more], 1)
    ids[:, [0, 9, 16, 23]] = SEPARATOR
    return [ids, labels.masked_fill(ids == SEPARATOR, -100)]


def preferences(generator: torch.Generator) -> list[Tensor]:
    """Sequences that count up, the same shuffled, and a one."""
    ids = make_batch("gpt", generator)[0].clamp(min=1)
    return [ids, ids[:, torch.randperm(ids.shape[1], generator=generator)], torch.ones(BATCH)]


def views(width: int, count: int, generator: torch.Generator) -> list[Tensor]:
    """Noisy views of templates, and the class."""
    templates = torch.randn(CLASSES, width, generator=torch.Generator().manual_seed(8))
    labels = torch.randint(0, CLASSES, (48,), generator=generator)
    return [*(templates[labels] + 0.7 * torch.randn(48, width, generator=generator) for _ in range(count)), labels]


def decisions(generator: torch.Generator) -> list[Tensor]:
    """States; the best action and what it brings."""
    x, action = views(32, 1, generator)
    return [x, torch.stack([action.float(), x[:, :4].sum(1)], 1)]


def copies(generator: torch.Generator) -> list[Tensor]:
    """Vectors as input and as aim."""
    x = views(64, 1, generator)[0]
    return [x, x]


def molecules(generator: torch.Generator) -> list[Tensor]:
    """Features of nodes, edges, a class."""
    x, labels = members(20, generator)
    edges = (torch.rand(len(x), 20, 20, generator=generator) < 0.6).float()
    return [x, edges, labels]


def members(count: int, generator: torch.Generator) -> list[Tensor]:
    """Members of sets, a class."""
    templates = torch.randn(CLASSES, 32, generator=torch.Generator().manual_seed(9))
    labels = torch.randint(0, CLASSES, (24,), generator=generator)
    return [templates[labels][:, None] + 1.5 * torch.randn(24, count, 32, generator=generator), labels]


def preferred(beta: float, y: Tensor, labels: Tensor) -> Tensor:
    """The logistic loss of preferences."""
    return F.softplus(-beta * y * labels).mean()


def taught(y: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy, and the distance from the teacher."""
    classes, guess, aim = y.split([CLASSES, WIDTH, WIDTH], 1)
    return F.cross_entropy(classes, labels) + 4 * (guess - aim).square().sum(1).mean()


def decided(y: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the action, squared error of the value."""
    return F.cross_entropy(y.float()[:, :CLASSES], labels[:, 0].long()) + F.mse_loss(y.float()[:, -1], labels[:, 1])


def bounded(y: Tensor, x: Tensor) -> Tensor:
    """Squared error, and how far the middle is from a normal distribution."""
    painted, mean, spread = y.float().split([64, 32, 32], 1)
    return F.mse_loss(painted, x) + 1e-3 * (spread.exp() + mean.square() - 1 - spread).sum(1).mean()


MODELS |= {
    "packed": (Packed, documents, None),
    "recompute": (Recomputed, documents, None),
    "dpo": (Preferring, preferences, partial(preferred, 0.1)),
    "ema": (Taught, partial(views, 64, 2), taught),
    "actor": (Deciding, decisions, decided),
    "vae": (Variational, copies, bounded),
    "graph": (Graphs, molecules, None),
    "sets": (Sets, partial(members, 64), None),
}
