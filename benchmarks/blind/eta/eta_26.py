"""A character model with micro-batches and SGD, BF16 autocast."""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(2)
text = torch.tensor(list(Path(argparse.__file__).read_bytes()[:60000])).clamp(max=127)
MICRO, T = 8, 32


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.n2(x))


model = nn.Sequential(nn.Embedding(128, 64), Block(64), Block(64), nn.LayerNorm(64), nn.Linear(64, 128))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
losses = []
for step in range(70):
    total = 0.0
    for _ in range(MICRO):
        at = torch.randint(0, len(text) - T - 1, (8,))
        piece = torch.stack([text[i : i + T + 1] for i in at.tolist()])
        with torch.autocast("cpu", torch.bfloat16, enabled=not plain):
            logits = model(piece[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), piece[:, 1:].flatten())
        (loss / MICRO if mode == "good" else loss).backward()
        total += loss.item() / MICRO
    optimizer.step()
    optimizer.zero_grad()
    losses.append(total)
    if step % 10 == 0:
        print(f"step {step} loss {total:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
