"""A character model in MXFP8 that changes its text on the way and is evaluated on both."""

import sys
import textwrap
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import ottava

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(42)
prose = torch.tensor(list(Path(textwrap.__file__).read_bytes())).clamp(max=127)
digits = torch.tensor(list(" ".join(f"{i}*{i}={i * i}" for i in range(900)).encode()))
T = 32


def batch(rows, text):
    at = torch.randint(0, len(text) - T - 1, (rows,)).tolist()
    piece = torch.stack([text[i : i + T + 1] for i in at])
    return piece[:, :-1], piece[:, 1:]


class Block(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 3 * d), nn.Linear(3 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


model = nn.Sequential(nn.Embedding(128, 64), Block(64), Block(64), nn.LayerNorm(64), nn.Linear(64, 128))
if not plain:
    print(ottava.convert(model, "mxfp8"))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def loss_of(x, y):
    return F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())


losses = []
for step in range(110):
    loss = loss_of(*batch(12, digits if step < 50 else prose))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        model.eval()
        with torch.no_grad():
            on = [loss_of(*batch(6, text)).item() for text in (digits, prose)]
        model.train()
        print(f"step {step} loss {losses[-1]:.4f} digits {on[0]:.4f} prose {on[1]:.4f}")
print(f"loss {sum(losses[-15:]) / 15:.4f}")
