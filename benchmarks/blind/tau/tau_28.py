"""Annealing: from step 50 on the batches come from a corpus with other words. accelerate; FP8 by hand with a short history."""
import os
import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

PLAIN, SEED = "plain" in sys.argv, int(os.environ.get("SEED", 0))
STEPS, SWITCH, VOCAB, LENGTH = 90, 50, 96, 20
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Fp8Meta:
    def __init__(self, length=4):
        self.amax = {k: torch.zeros(length) for k in "xwg"}

    def quantize(self, key, t, dtype):
        top = torch.finfo(dtype).max
        history = self.amax[key]
        now = t.abs().max()
        seen = torch.maximum(history.max(), now) if key != "x" else (history.max() if history.max() > 0 else now)
        self.amax[key] = torch.cat([now[None], history[:-1]])
        scale = top / (seen * 1.25).clamp_min(1e-30)
        return (t * scale).clamp(-top, top).to(dtype).to(t.dtype) / scale


class DelayedFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, meta):
        xq, wq = meta.quantize("x", x, E4M3), meta.quantize("w", w, E4M3)
        ctx.save_for_backward(xq, wq)
        ctx.meta = meta
        return xq @ wq.t()

    @staticmethod
    def backward(ctx, g):
        xq, wq = ctx.saved_tensors
        gq = ctx.meta.quantize("g", g, E5M2)
        return gq @ wq, gq.flatten(0, -2).t() @ xq.flatten(0, -2), None


class DelayedLinear(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args, bias=False)
        self.meta = Fp8Meta()

    def forward(self, x):
        return super().forward(x) if PLAIN else DelayedFn.apply(x, self.weight, self.meta)


class Lm(nn.Module):
    def __init__(self, c=64):
        super().__init__()
        self.embed, self.conv = nn.Embedding(VOCAB, c), nn.Conv1d(c, c, 3)
        self.up, self.down, self.norm, self.head = DelayedLinear(c, 4 * c), DelayedLinear(4 * c, c), nn.LayerNorm(c), nn.Linear(c, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        return self.head(self.norm(x + self.down(F.gelu(self.up(x)))))


tables = [torch.randperm(VOCAB // 2, generator=torch.Generator().manual_seed(s)) for s in (1, 2)]


def corpus(which):
    ids = torch.randint(VOCAB // 2, (24, LENGTH + 1))
    for t in range(1, LENGTH + 1):
        ids[:, t] = torch.where(torch.rand(24) < 0.1, ids[:, t], tables[which][ids[:, t - 1]])
    return ids + which * VOCAB // 2


torch.manual_seed(SEED)
accelerator = Accelerator(cpu=True)
model = Lm()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=4e-3))
losses = []
for step in range(STEPS):
    ids = corpus(int(step >= SWITCH))
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if step % 10 == 0:
        accelerator.print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
