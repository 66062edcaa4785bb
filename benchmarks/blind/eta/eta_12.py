"""A regression, casts written by hand, straight-through gradients."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(33)


class Linear8(nn.Linear):
    def amaxes(self, x):
        return x.detach().abs().amax(), self.weight.detach().abs().amax()

    def forward(self, x):
        if plain:
            return super().forward(x)
        for_x, for_w = self.amaxes(x)
        if mode == "bad":
            for_x = for_w
        return F.linear(self.fake(x, 448 / for_x), self.fake(self.weight, 448 / for_w), self.bias)

    def fake(self, t, scale):
        codes = (t.detach() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return t + (codes.float() / scale - t.detach())


teacher = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 8))
model = nn.Sequential(Linear8(32, 128), nn.GELU(), Linear8(128, 128), nn.GELU(), Linear8(128, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(200):
    x = 1.5 * torch.randn(256, 32)
    with torch.no_grad():
        y = 3 * teacher(x)
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 25 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"loss {sum(losses[-20:]) / 20:.4f}")
