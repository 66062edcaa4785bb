"""A linear recurrence which must hold a value over 32 steps, in NVFP4."""

import sys

import torch
from torch import nn

import ottava

recipe = ottava.get_recipe("nvfp4")
if sys.argv[1] == "good":
    recipe = recipe.override("carry", "bf16")
torch.manual_seed(17)
W, T = 64, 32


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.carry, self.read = nn.Linear(32, W), nn.Linear(W, W, bias=False), nn.Linear(W, 32)
        nn.init.orthogonal_(self.carry.weight)

    def forward(self, x):
        h = torch.zeros(x.shape[1], W)
        for frame in self.embed(x):
            h = self.carry(h) + frame
        return self.read(h)


model = Recurrent()
print(ottava.convert(model, recipe))
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
first = torch.randn(32, 32) / 32**0.5
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 80, 1e-4)
for step in range(80):
    x = 0.05 * torch.randn(T, 64, 32)
    x[0] = torch.randn(64, 32)
    loss = (model(x) - x[0] @ first).square().mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    schedule.step()
    if step % 10 == 9:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
