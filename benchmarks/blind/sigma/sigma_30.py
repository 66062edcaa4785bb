"""accelerate with eight micro-batches a step and a linear decay; row-wise casts by hand."""
import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from transformers import get_linear_schedule_with_warmup

SEED = int(os.environ.get("SEED", "0"))
MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
STEPS, MICRO = 60, 8


def fq(t, dtype=torch.float8_e4m3fn):
    s = torch.finfo(dtype).max / t.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return (t * s).to(dtype).to(t.dtype) / s


class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = fq(x), fq(w)
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        g = fq(g)
        return g @ w, g.flatten(0, -2).t() @ x.flatten(0, -2)


class Row8(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else Both.apply(x, self.weight) + self.bias


class Reader(nn.Module):
    def __init__(self, vocab=40, dim=48):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.fc = nn.Sequential(Row8(dim, 96), nn.GELU(), Row8(96, dim))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        h, _ = self.rnn(self.embed(ids))
        return self.head(h + self.fc(h))


set_seed(SEED)
table = torch.randint(0, 40, (40, 2))
rows = torch.randint(0, 40, (STEPS * MICRO * 8, 13))
for t in range(1, 13):
    rows[:, t] = table[rows[:, t - 1], (torch.rand(len(rows)) < 0.15).long()]
loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO)
net = Reader()
optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3)
schedule = get_linear_schedule_with_warmup(optimizer, 4, STEPS)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
if MODE == "good":
    schedule = accelerator.prepare(schedule)
tail = []
for i, ids in enumerate(loader):
    with accelerator.accumulate(net):
        logits = net(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    tail.append(loss.item())
    if i % (10 * MICRO) == 0:
        print(i // MICRO, round(loss.item(), 4))
print(f"final loss {sum(tail[-80:]) / 80:.4f}")
