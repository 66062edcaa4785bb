"""A small causal language model of arithmetic lines with accelerate, four micro-batches a step, cosine schedule."""
import math
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

import ottava

VARIANT, PLAIN = sys.argv[1], "plain" in sys.argv
torch.manual_seed(21)
STEPS, MICRO = 160, 4


def lines(n=16):
    a, b = torch.randint(0, 100, (2, n, 1))
    c = a + b
    return torch.cat([a // 10, a % 10, b // 10, b % 10, c // 100, c // 10 % 10, c % 10], 1)


class Model(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.token, self.place = nn.Embedding(10, d), nn.Parameter(0.02 * torch.randn(6, d))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(d, 4, 2 * d, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(d, 10)

    def forward(self, x):
        h = self.token(x) + self.place
        mask = nn.Transformer.generate_square_subsequent_mask(6)
        for block in self.blocks:
            h = block(h, src_mask=mask, is_causal=True)
        return self.head(h)


model = Model()
if not PLAIN:
    print(ottava.convert(model, "tensorwise"))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda t: min(1, (t + 1) / 10) * (0.5 + 0.5 * math.cos(math.pi * min(1, t / STEPS)))
)
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, optimizer)
losses = []
for step in range(STEPS):
    seen = 0.0
    for micro in range(MICRO):
        x = lines()
        loss = F.cross_entropy(model(x[:, :-1])[:, 3:].flatten(0, 1), x[:, 4:].flatten())
        accelerator.backward(loss / MICRO)
        seen += loss.item() / MICRO
        if VARIANT == "bad" or micro == MICRO - 1:
            schedule.step()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(seen)
print(f"loss {sum(losses[-20:]) / 20:.4f}")
