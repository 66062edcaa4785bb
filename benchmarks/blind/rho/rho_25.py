"""Tagging with accelerate. Weights are cast to FP8 once an update and shared by the micro-batches of a step."""
import os
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

BAD = sys.argv[1] == "bad"
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)


def fp8(t):
    scale = 448 / t.detach().abs().amax().clamp(min=1e-30)
    return (t.detach() * scale).to(torch.float8_e4m3fn), scale


class CachedLinear(nn.Linear):
    def codes(self):
        version = self.weight._version
        if getattr(self, "version", None) != version:
            self.cache, self.version = fp8(self.weight), version
        return self.cache

    def forward(self, x):
        if PLAIN:
            return super().forward(x)
        codes, scale = self.codes()
        w = codes.float() / scale
        w = self.weight + (w - self.weight).detach()
        xc, xs = fp8(x)
        return F.linear(x + (xc.float() / xs - x).detach(), w, self.bias)


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.98)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                update = (state["m"] * first + p.grad * (1 - first)).sign()
                target = p.data if BAD else p
                target.add_(update, alpha=-group["lr"])
                state["m"].mul_(second).add_(p.grad, alpha=1 - second)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(64, 64)
        self.inner = nn.ModuleList(CachedLinear(64 if i else 192, 64) for i in range(3))
        self.norm = nn.LayerNorm(64)
        self.out = CachedLinear(64, 24)

    def forward(self, ids):
        e = self.words(ids)
        h = torch.cat([e, e.roll(1, 1), e.roll(-1, 1)], -1)
        h = F.gelu(self.inner[0](h))
        for layer in self.inner[1:]:
            h = h + F.gelu(layer(h))
        return self.out(self.norm(h))


GROUP = torch.randint(0, 24, (64,))
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
ids = torch.randint(0, 64, (2 * 80 * 16, 24))
tags = (GROUP[ids] + GROUP[ids.roll(1, 1)]) % 24
tags = torch.where(ids.roll(-1, 1) < 12, GROUP[ids], tags)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids, tags), batch_size=16, shuffle=True)
model = Tagger()
optimizer = Lion(model.parameters(), lr=3e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for x, y in loader:
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
