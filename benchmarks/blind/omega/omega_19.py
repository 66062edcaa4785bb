"""Contrastive retrieval whose negatives get harder: after a while each batch is made of near neighbours."""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

plain = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
torch.set_num_threads(1)

STEPS, BATCH, FEATURES, ITEMS = 160, 64, 48, 1024


def cast(x):
    """Blocks of 16 numbers share a scale."""
    b = x.detach().unflatten(-1, (-1, 16))
    s = 448.0 / b.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    y = ((b * s).to(torch.float8_e4m3fn).float() / s).flatten(-2)
    return x + (y - x).detach()


class Linear8(nn.Linear):
    def forward(self, x):
        return super().forward(x) if plain else F.linear(cast(x), cast(self.weight), self.bias)


def tower():
    return nn.Sequential(Linear8(FEATURES, 128), nn.GELU(), Linear8(128, 128), nn.GELU(), Linear8(128, 32))


world = torch.Generator().manual_seed(77)
items = torch.randn(32, FEATURES, generator=world).repeat_interleave(ITEMS // 32, 0)
items = items + 0.5 * torch.randn(ITEMS, FEATURES, generator=world)
turn = torch.linalg.qr(torch.randn(FEATURES, FEATURES, generator=world))[0]

asks, docs = tower(), tower()
heat = nn.Parameter(torch.tensor(2.0))
optimizer = torch.optim.AdamW([*asks.parameters(), *docs.parameters(), heat], lr=2e-3)


def pick(step):
    """Random items at first; then, every other step, the neighbours of one item in the present embedding."""
    if step < 60 or step % 2:
        return torch.randperm(ITEMS)[:BATCH]
    with torch.no_grad():
        e = F.normalize(docs(items), dim=-1)
    return (e @ e[torch.randint(0, ITEMS, ())]).topk(BATCH).indices


losses = []
for step in range(STEPS):
    at = pick(step)
    q = F.normalize(asks(items[at] @ turn + 0.3 * torch.randn(BATCH, FEATURES)), dim=-1)
    d = F.normalize(docs(items[at] + 0.1 * torch.randn(BATCH, FEATURES)), dim=-1)
    scores = heat.exp().clamp(max=50) * q @ d.T
    target = torch.arange(BATCH)
    loss = (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 < 2:
        print(f"step {step} loss {losses[-1]:.4f}")

with torch.no_grad():
    q = F.normalize(asks(items @ turn + 0.3 * torch.randn(ITEMS, FEATURES)), dim=-1)
    d = F.normalize(docs(items), dim=-1)
    found = ((q @ d.T).argmax(-1) == torch.arange(ITEMS)).float().mean()
print(f"found at once {found:.3f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
