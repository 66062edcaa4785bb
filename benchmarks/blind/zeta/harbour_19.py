"""Which of five rhythms is in a piece of EEG: eight electrodes, 12 samples each, float8 linears by hand."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

VARIANT, PLAIN = sys.argv[1], "plain" in sys.argv
torch.manual_seed(53)
UNIT = {"good": 1.0, "bad": 1e-6}[VARIANT]  # as the recorder's driver gives them


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        s = 448.0 / x.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        return (x * s).to(torch.float8_e4m3fn).to(x.dtype) / s

    @staticmethod
    def backward(ctx, g):
        s = 57344.0 / g.abs().max().clamp(min=1e-30)
        return (g * s).to(torch.float8_e5m2).to(g.dtype) / s


class Dense8(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else F.linear(Cast.apply(x), Cast.apply(self.weight), self.bias)


model = nn.Sequential(
    nn.LayerNorm(96), Dense8(96, 128), nn.LayerNorm(128), nn.GELU(), Dense8(128, 64), nn.GELU(), nn.Linear(64, 5)
)
gain = torch.randn(8, 1)
time = torch.arange(12) / 24


def batch(n=64):
    kind = torch.randint(0, 5, (n,))
    speed = torch.tensor([1.0, 2.5, 4.0, 6.0, 9.0])[kind][:, None]
    wave = torch.sin(6.283 * (speed * time + torch.rand(n, 1)))
    volt = 10 * wave[:, None] * gain + 6 * torch.randn(n, 8, 12)
    return volt.flatten(1) * UNIT, kind


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for step in range(300):
    x, kind = batch()
    loss = F.cross_entropy(model(x), kind)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-20:]) / 20:.4f}")
