"""Denoising of signals whose loudness is warmed up; scales of the casts come from a calibration."""

import sys

import torch
from torch import nn

OPTIONS = {"good": {"calibrate_every": 1}, "bad": {"calibrate_every": 0}}[sys.argv[1]]
PLAIN = "plain" in sys.argv
STEPS, FRAME, WIDTH = 150, 64, 128


class CalibratedLinear(nn.Linear):
    """E4M3 operands. `calibrate_every` 0: scales are those of the first forward."""

    def __init__(self, inputs, outputs, calibrate_every=1):
        super().__init__(inputs, outputs)
        self.calibrate_every, self.calls, self.scale = calibrate_every, 0, torch.ones(())

    def forward(self, x):
        if PLAIN:
            return super().forward(x)
        if self.calls == 0 or (self.calibrate_every and self.calls % self.calibrate_every == 0):
            self.scale = 448.0 / x.detach().abs().amax().clamp(min=1e-12)
        self.calls += 1
        weight_scale = 448.0 / self.weight.detach().abs().amax()
        return nn.functional.linear(self.cast(x, self.scale), self.cast(self.weight, weight_scale), self.bias)

    @staticmethod
    def cast(x, scale):
        rounded = (x.detach() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) / scale
        return x + (rounded - x).detach()


torch.manual_seed(30)
net = nn.Sequential(
    CalibratedLinear(FRAME, WIDTH, **OPTIONS),
    nn.LeakyReLU(0.1),
    CalibratedLinear(WIDTH, WIDTH, **OPTIONS),
    nn.LeakyReLU(0.1),
    nn.Linear(WIDTH, FRAME),
)
basis = torch.linalg.qr(torch.randn(FRAME, 12))[0]
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
losses = []
for step in range(STEPS):
    loudness = 1.0 + 30.0 * min(1.0, step / 90)
    clean = loudness * torch.randn(128, 12) @ basis.t()
    heard = clean + 0.3 * loudness * torch.randn(128, FRAME)
    loss = (net(heard) - clean).square().mean() / clean.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 25 == 0:
        print(step, round(losses[-1], 4))
print(f"loss {sum(losses[-10:]) / 10:.4f}")
