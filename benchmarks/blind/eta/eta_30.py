"""A picture as a function of two coordinates, in MXFP8."""

import sys

import torch
from torch import nn

import ottava

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(24)


def picture(at):
    x, y = at[:, 0], at[:, 1]
    return torch.stack([torch.sin(23 * x + 9 * y), torch.cos(31 * y), torch.sin(17 * x) * torch.cos(13 * y)], 1)


frequencies = torch.randn(2, 32) * 12


class Picture(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(2, 64)
        with torch.no_grad():
            self.lift.weight.copy_(torch.cat([frequencies, frequencies], 1).t())
        self.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 3))

    def forward(self, at):
        phase = self.lift(at)
        return self.body(torch.cat([phase[:, :32].sin(), phase[:, 32:].cos()], 1))


model = Picture()
if not plain:
    recipe = ottava.get_recipe("mxfp8")
    if mode == "good":
        recipe = recipe.override("lift", "bf16")
    print(ottava.convert(model, recipe, filter=lambda name, layer: True))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(180):
    at = torch.rand(512, 2) * 2 - 1
    loss = (model(at).float() - picture(at)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"loss {sum(losses[-20:]) / 20:.4f}")
