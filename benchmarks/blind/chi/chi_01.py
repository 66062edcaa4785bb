"""A deep residual autoencoder of sensor windows, with FP8 linears of our own (scales for activations, per-tensor)."""
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
E4M3_MAX = 448.0
RECALIBRATE = {"good": 1, "bad": 0}[MODE]


def e4m3(x, scale):
    return (x * scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype) / scale


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return e4m3(x, scale)

    @staticmethod
    def backward(ctx, g):
        return g, None


class Linear8(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("x_scale", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        if PLAIN:
            return super().forward(x)
        if self.training:
            if self.calls == 0 or (RECALIBRATE and self.calls % RECALIBRATE == 0):
                self.x_scale.fill_(E4M3_MAX / x.detach().abs().amax().clamp(min=1e-12))
            self.calls += 1
        w_scale = E4M3_MAX / self.weight.detach().abs().amax()
        return F.linear(Cast.apply(x, self.x_scale.clone()), Cast.apply(self.weight, w_scale), self.bias)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.up, self.down = Linear8(d, 2 * d), Linear8(2 * d, d)
        nn.init.normal_(self.up.weight, std=0.02)
        nn.init.normal_(self.down.weight, std=0.02)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)).square())


class AutoEncoder(nn.Module):
    def __init__(self, n=64, d=96, code=16):
        super().__init__()
        self.inp, self.out = nn.Linear(n, d), nn.Linear(d, n)
        self.enc = nn.Sequential(Block(d), Block(d), Linear8(d, code))
        self.dec = nn.Sequential(Linear8(code, d), Block(d), Block(d))
        nn.init.normal_(self.inp.weight, std=0.01)

    def forward(self, x):
        return self.out(self.dec(self.enc(self.inp(x))))


def batches(n, generator):
    t = torch.linspace(0, 1, 64)
    while True:
        f = torch.rand(n, 3, 1, generator=generator) * 5 + 1
        a = torch.randn(n, 3, 1, generator=generator)
        p = torch.rand(n, 3, 1, generator=generator) * 6.28
        yield (a * torch.sin(6.28 * f * t + p)).sum(1)


torch.manual_seed(SEED)
generator = torch.Generator().manual_seed(100 + SEED)
model = AutoEncoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
losses = []
for step, x in zip(range(200), batches(128, generator)):
    loss = F.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, round(losses[-1], 4))
print("final loss", round(sum(losses[-20:]) / 20, 4))
