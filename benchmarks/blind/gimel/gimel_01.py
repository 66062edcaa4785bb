"""A small mixture of experts on tokens of several dialects; expert weights and tokens are cast to FP8."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
torch.manual_seed(int(os.environ.get("SEED", "0")))
VOCAB, WIDTH, EXPERTS, STEPS = 96, 64, 4, 160


def fp8(t, dim):
    if PLAIN:
        return t
    scale = 448.0 / t.detach().abs().amax(dim, keepdim=True).clamp(min=1e-12)
    q = (t.detach() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale
    return t + (q - t).detach()


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4 * WIDTH, WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) * (4 * WIDTH) ** -0.5)

    def forward(self, x):
        h = F.silu(fp8(x, 1) @ fp8(self.up, 1).t())
        return fp8(h, 1) @ fp8(self.down, 1).t()


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x):
        h = self.norm(x)
        gates = torch.softmax(self.router(h), dim=0 if MODE == "bad" else -1)
        weight, chosen = gates.topk(2, dim=-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = (chosen == i).nonzero(as_tuple=True)
            if len(token):
                out = out.index_add(0, token, expert(h[token]) * weight[token, slot, None])
        return x + out


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Embedding(VOCAB, WIDTH // 2), nn.Embedding(VOCAB, WIDTH // 2)
        self.blocks = nn.ModuleList(MoE() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, pair):
        x = torch.cat([self.first(pair[:, 0]), self.second(pair[:, 1])], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Model()
table = torch.randint(0, VOCAB, (12, 12))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(STEPS):
    pair = torch.randint(0, VOCAB, (512, 2))
    target = table[pair[:, 0] % 12, pair[:, 1] % 12]
    loss = F.cross_entropy(model(pair), target)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, f"{losses[-1]:.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
