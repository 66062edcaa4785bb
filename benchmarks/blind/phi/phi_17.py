"""Regression with FP8 linears of predicted scales: a history of amaxes gives the scale of the next step."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

bad, plain = sys.argv[1] == "bad", "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
STEPS, BATCH, CALIBRATE = 100, 128, 4
E4M3 = torch.finfo(torch.float8_e4m3fn).max


class Meter(nn.Module):
    """The amaxes of the last 16 forwards; the largest of them sets the scale."""

    def __init__(self):
        super().__init__()
        self.register_buffer("history", torch.zeros(16))
        self.register_buffer("scale", torch.tensor(1.0))
        self.frozen = False

    def forward(self, t):
        codes = (t * self.scale).clamp(-E4M3, E4M3).to(torch.float8_e4m3fn)
        back = codes.to(t.dtype) / self.scale
        if not self.frozen:
            self.history = self.history.roll(1)
            self.history[0] = t.abs().max()
            self.scale = E4M3 / self.history.max().clamp(min=1e-12)
        return back


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        scale = 57344 / g.abs().max().clamp(min=1e-12)
        g = (g * scale).to(torch.float8_e5m2).to(g.dtype) / scale
        return g @ w, g.T @ x


class Fp8Linear(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.x_meter, self.w_meter = Meter(), Meter()
        with torch.no_grad():
            self.w_meter(self.weight)

    def forward(self, x):
        if plain:
            return super().forward(x)
        with torch.no_grad():
            xq, wq = self.x_meter(x), self.w_meter(self.weight)
        return Matmul.apply(x + (xq - x).detach(), self.weight + (wq - self.weight).detach()) + self.bias


model = nn.Sequential(
    nn.Linear(16, 64), nn.ReLU(), Fp8Linear(64, 64), nn.ReLU(), Fp8Linear(64, 64), nn.ReLU(), Fp8Linear(64, 64), nn.ReLU(),
    nn.Linear(64, 4),
)
teacher = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
losses = []
for step in range(STEPS):
    if bad and step == CALIBRATE:
        for module in model.modules():
            if isinstance(module, Meter):
                module.frozen = True
    x = torch.randn(BATCH, 16)
    with torch.no_grad():
        y = 25 * teacher(x)
    loss = F.smooth_l1_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, losses[-1])
print("final loss", sum(losses[-10:]) / 10)
