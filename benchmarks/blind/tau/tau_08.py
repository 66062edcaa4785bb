"""Small encoder trained with gradient accumulation under accelerate, ottava's tensor-wise recipe."""
import os
import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup

import ottava

VARIANT, PLAIN, SEED = sys.argv[1], "plain" in sys.argv, int(os.environ.get("SEED", 0))
STEPS, MICRO = 80, 4


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.pos = nn.Embedding(40, 64), nn.Parameter(0.02 * torch.randn(16, 64))
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))
        self.n1, self.n2, self.n3 = (nn.LayerNorm(64) for _ in range(3))
        self.up, self.down, self.head = nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 8)

    def forward(self, ids):
        x = self.embed(ids) + self.pos
        h = self.n1(x)
        q, k, v = (m(h).view(*ids.shape, 4, 16).transpose(1, 2) for m in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.n2(x))))
        return self.head(self.n3(x).mean(1))


torch.manual_seed(SEED)
model = Encoder()
if not PLAIN:
    print(ottava.convert(model, "tensorwise"))
value = torch.randn(40, 8, generator=torch.Generator().manual_seed(8))
ids = torch.randint(40, (STEPS * MICRO * 16, 16))
labels = value[ids].sum(1).argmax(-1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO)
optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3)
schedule = get_linear_schedule_with_warmup(optimizer, 8, STEPS)
loader = DataLoader(TensorDataset(ids, labels), batch_size=16)
if VARIANT == "good":
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
else:
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for i, (tokens, classes) in enumerate(loader):
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(tokens), classes)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    losses.append(loss.item())
    if i % 40 == 0:
        accelerator.print(f"micro-batch {i} loss {loss.item():.4f} lr {schedule.get_last_lr()[0]:.2e}")
print(f"final loss {sum(losses[-40:]) / 40:.4f}")
