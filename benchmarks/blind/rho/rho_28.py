"""Masked-feature model with an AdamW whose moments live in FP8."""
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

BAD = sys.argv[1] == "bad"
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)


class Moment:
    """A tensor kept in E4M3 with a scale for each group of numbers."""

    def __init__(self, like, group):
        self.shape, self.group = like.shape, group or like.numel()
        self.store(torch.zeros_like(like))

    def store(self, t):
        if PLAIN:
            self.full = t
            return
        flat = F.pad(t.reshape(-1), (0, -t.numel() % self.group)).reshape(-1, self.group)
        self.scale = 448 / flat.abs().amax(1, keepdim=True).clamp(min=1e-30)
        self.codes = (flat * self.scale).to(torch.float8_e4m3fn)

    def load(self):
        if PLAIN:
            return self.full
        flat = self.codes.float() / self.scale
        return flat.reshape(-1)[: self.shape.numel()].reshape(self.shape)


class AdamW8(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["t"] = 0
                    state["m"] = Moment(p, 64)
                    state["v"] = Moment(p, None if BAD else 64)
                state["t"] += 1
                m = state["m"].load().lerp(p.grad, 1 - b1)
                if BAD:
                    v = state["v"].load() * b2 + p.grad.square() * (1 - b2)
                    state["v"].store(v)
                else:
                    v = state["v"].load().square() * b2 + p.grad.square() * (1 - b2)
                    state["v"].store(v.sqrt())
                v = state["v"].load() if BAD else state["v"].load().square()
                state["m"].store(m)
                m, v = m / (1 - b1 ** state["t"]), v / (1 - b2 ** state["t"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(m, v.sqrt() + group["eps"], value=-group["lr"])


class Columns(nn.Module):
    """Cells of a table as tokens: predicts the hidden ones."""

    def __init__(self, columns=12, bins=16, wide=64):
        super().__init__()
        self.cell = nn.Embedding(columns * (bins + 1), wide)
        self.start = columns, bins
        self.layer = nn.TransformerEncoderLayer(wide, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(wide, bins)

    def forward(self, x):
        columns, bins = self.start
        return self.head(self.layer(self.cell(x + torch.arange(columns) * (bins + 1))))


mixing = torch.randn(3, 12)


def batch(n=48):
    z = torch.randn(n, 3) @ mixing / 3**0.5 + 0.1 * torch.randn(n, 12)
    bins = ((torch.special.ndtr(z)) * 16).long().clamp(0, 15)
    hidden = torch.rand(n, 12) < 0.25
    hidden[:, 0] |= ~hidden.any(1)
    return bins.masked_fill(hidden, 16), bins, hidden


model = Columns()
optimizer = AdamW8(model.parameters(), lr=3e-3)
losses = []
for step in range(100):
    x, y, hidden = batch()
    loss = F.cross_entropy(model(x)[hidden], y[hidden])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
