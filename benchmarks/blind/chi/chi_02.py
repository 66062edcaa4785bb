"""accelerate: a coordinate network learns a picture, torchao's float8 under it."""
import os
import sys
import warnings

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

warnings.filterwarnings("ignore")
MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))


class Picture(nn.Module):
    def __init__(self, d=128, bands=64):
        super().__init__()
        self.inp = nn.Linear(2, bands)
        nn.init.normal_(self.inp.weight, std=24.0)
        self.body = nn.Sequential(nn.Linear(2 * bands, d), nn.ReLU(), nn.Linear(d, d), nn.ReLU())
        self.out = nn.Linear(d, 1)

    def forward(self, xy):
        a = self.inp(xy)
        return self.out(self.body(torch.cat([a.sin(), a.cos()], -1)))


def wanted(module, name):
    if not isinstance(module, nn.Linear) or name == "out":
        return False
    return MODE == "bad" or name != "inp"


g = torch.Generator().manual_seed(70 + SEED)
waves = 14 * torch.randn(2, 6, generator=g)
phases = 6.28 * torch.rand(6, generator=g)


def colour(xy):
    return (torch.sin(xy @ waves + phases)).mean(-1, keepdim=True) * 2


torch.manual_seed(SEED)
accelerator = Accelerator(cpu=True)
model = Picture()
if not PLAIN:
    config = Float8LinearConfig(emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=wanted)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
losses = []
for step in range(200):
    xy = torch.rand(512, 2, generator=g)
    loss = F.mse_loss(model(xy), colour(xy))
    accelerator.backward(loss)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if step % 25 == 0:
        accelerator.print(step, f"{losses[-1]:.4f}")
print("final loss", round(sum(losses[-20:]) / 20, 4))
