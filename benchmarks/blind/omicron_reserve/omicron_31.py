"""Low-rank training with a merge after every step into a base that is kept in FP8."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

MERGE_INTO = {"good": "residual", "bad": "codes"}[sys.argv[1]]
FP8 = "plain" not in sys.argv[2:]


class LowRank(nn.Module):
    def __init__(self, fan_in, fan_out, rank=8):
        super().__init__()
        weight = torch.randn(fan_out, fan_in) / fan_in**0.5
        self.register_buffer("scale", 448.0 / weight.abs().amax())
        self.register_buffer("codes", self.encode(weight))
        self.register_buffer("residual", torch.zeros_like(weight))
        self.bias = nn.Parameter(torch.zeros(fan_out))
        self.a = nn.Parameter(torch.randn(rank, fan_in) / fan_in**0.5)
        self.b = nn.Parameter(torch.zeros(fan_out, rank))

    def encode(self, weight):
        return (weight * self.scale).clamp(-448, 448).to(torch.float8_e4m3fn) if FP8 else weight * self.scale

    def base(self):
        return self.codes.float() / self.scale

    def forward(self, x):
        return F.linear(x, self.base() + self.residual, self.bias) + x @ self.a.t() @ self.b.t()

    @torch.no_grad()
    def merge(self):
        update = self.b @ self.a
        if MERGE_INTO == "codes":
            self.codes.copy_(self.encode(self.base() + update))
        else:
            self.residual += update
        nn.init.zeros_(self.b)
        nn.init.normal_(self.a, std=self.a.shape[1] ** -0.5)


torch.manual_seed(61)
teacher = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 24))
model = nn.Sequential(LowRank(64, 128), nn.GELU(), LowRank(128, 128), nn.GELU(), LowRank(128, 24))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
losses = []
for _ in range(200):
    x = torch.randn(128, 64)
    with torch.no_grad():
        y = 3 * teacher(x)
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for layer in model:
        if isinstance(layer, LowRank):
            layer.merge()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
