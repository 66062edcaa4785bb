"""A GRU forecaster whose weights are cast to FP8 once and kept for the micro-batches of a step."""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
torch.set_num_threads(1)

EPOCHS, STEPS, MICRO, BATCH, LENGTH, WIDTH = 8, 20, 2, 32, 20, 64


def cast(x):
    scale = 448.0 / x.detach().abs().amax().clamp(min=1e-12)
    return (x.detach() * scale).to(torch.float8_e4m3fn), scale


class Linear8(nn.Linear):
    """Keeps the codes of its weight; `fresh` says that they have to be made anew."""

    fresh = True

    def forward(self, x):
        if plain:
            return super().forward(x)
        if self.fresh:
            self.codes, self.scale = cast(self.weight)
            self.fresh = False
        w = self.codes.float() / self.scale
        w = self.weight + (w - self.weight).detach()
        c, s = cast(x)
        return F.linear(x + (c.float() / s - x).detach(), w, self.bias)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.gates = Linear8(1 + WIDTH, 2 * WIDTH)
        self.new = Linear8(1 + WIDTH, WIDTH)
        self.head = Linear8(WIDTH, 1)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], WIDTH)
        out = []
        for t in range(x.shape[1]):
            z, r = torch.sigmoid(self.gates(torch.cat([x[:, t], h], -1))).chunk(2, -1)
            h = (1 - z) * h + z * torch.tanh(self.new(torch.cat([x[:, t], r * h], -1)))
            out.append(self.head(h))
        return torch.stack(out, 1)


def renew(model):
    for module in model.modules():
        if isinstance(module, Linear8):
            module.fresh = True


def series():
    t = torch.arange(LENGTH + 1) + 40 * torch.rand(BATCH, 1)
    pace = 0.3 + 0.5 * torch.rand(BATCH, 1)
    y = torch.sin(pace * t) + 0.4 * torch.sin(2.3 * pace * t) + 0.02 * torch.randn(BATCH, LENGTH + 1)
    return y[:, :-1, None], y[:, 1:, None]


model = Forecaster()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
losses = []
for epoch in range(EPOCHS):
    model.train()
    renew(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            x, y = series()
            loss = F.mse_loss(model(x)[:, 4:], y[:, 4:]) / MICRO
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not bad:
            renew(model)
        losses.append(loss.item() * MICRO)
    print(f"epoch {epoch} loss {sum(losses[-STEPS:]) / STEPS:.4f}")
print(f"final loss {sum(losses[-STEPS:]) / STEPS:.4f}")
