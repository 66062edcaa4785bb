"""Fit an image with a coordinate network (SIREN). Its linear layers train in float8 of torchao."""

import sys

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

everything = sys.argv[1] == "bad"
torch.manual_seed(10)
W = 64


class Siren(nn.Module):
    def __init__(self, omega=20.0):
        super().__init__()
        self.omega = omega
        self.first, self.second, self.third = nn.Linear(2, W), nn.Linear(W, W), nn.Linear(W, W)
        self.out = nn.Linear(W, 1)
        with torch.no_grad():
            self.first.weight.uniform_(-0.5, 0.5)
            for layer in (self.second, self.third):
                bound = (6 / W) ** 0.5 / omega
                layer.weight.uniform_(-bound, bound)

    def forward(self, x):
        x = torch.sin(self.omega * self.first(x))
        x = torch.sin(self.omega * self.second(x))
        x = torch.sin(self.omega * self.third(x))
        return self.out(x)


def image(x):
    return torch.sin(17 * x[:, :1] + 4 * x[:, 1:]) * torch.cos(13 * x[:, 1:] - 5 * x[:, :1])


model = Siren()
keep = {"out"} if everything else {"out", "first"}
config = Float8LinearConfig(emulate=True)
model = convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name not in keep)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(80):
    x = torch.rand(512, 2) * 2 - 1
    loss = (model(x) - image(x)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 9:
        print(f"step {step} loss {loss.item():.5f}", flush=True)
