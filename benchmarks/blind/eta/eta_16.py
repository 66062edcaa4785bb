"""A small character model in torchao's float8."""

import sys
import textwrap
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(17)
text = torch.tensor(list(Path(textwrap.__file__).read_bytes())).clamp(max=127)
T = 32


def batch(rows):
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
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(90):
    x, y = batch(16)
    loss = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
    loss.backward()
    optimizer.step()
    if mode == "good" or step == 0:
        optimizer.zero_grad()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"loss {sum(losses[-15:]) / 15:.4f}")
