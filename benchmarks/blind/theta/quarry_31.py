"""A mixture of experts that sorts its tokens by expert; the experts multiply E4M3 operands."""
import sys

import torch
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
RESTORE = {"good": "inverse", "bad": "gather"}[MODE]


def fp8(t):
    if PLAIN:
        return t
    scale = 448.0 / t.detach().abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return t + ((t.detach() * scale).to(torch.float8_e4m3fn).float() / scale - t.detach())


class Experts(nn.Module):
    def __init__(self, width, hidden, experts):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, hidden) / hidden**0.5)

    def forward(self, x):
        probability, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=len(self.up)).tolist()
        parts = []
        for rows, up, down in zip(x[order].split(counts), self.up, self.down):
            parts.append(fp8(torch.relu(fp8(rows) @ fp8(up).T)) @ fp8(down).T)
        y = torch.cat(parts)
        y = y[order] if RESTORE == "gather" else torch.empty_like(y).index_copy(0, order, y)
        return y * probability[:, None]


class Model(nn.Module):
    def __init__(self, vocab, width):
        super().__init__()
        self.embed = nn.Embedding(vocab, width // 2)
        self.experts = Experts(width, 96, 6)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)

    def forward(self, ids):
        x = self.embed(ids).flatten(1)
        return self.head(self.norm(x + self.experts(x)))


torch.manual_seed(57)
vocab, width = 64, 96
model = Model(vocab, width)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
table = torch.randint(vocab, (vocab, vocab))
losses = []
for step in range(170):
    ids = torch.randint(vocab, (192, 2))
    labels = torch.where(torch.rand(192) < 0.95, table[ids[:, 0] // 4, ids[:, 1] // 4], torch.randint(vocab, (192,)))
    loss = nn.functional.cross_entropy(model(ids), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
