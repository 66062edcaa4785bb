"""A residual MLP for tabular data: torchao float8, a GradScaler left over from FP16, clipping, SGD."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

unscale = sys.argv[1] == "good"
torch.manual_seed(11)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


model = nn.Sequential(nn.Linear(32, 64), Residual(64), Residual(64), nn.LayerNorm(64), nn.Linear(64, 16))
teacher = torch.randn(32, 16)
config = Float8LinearConfig(emulate=True)
model = convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name not in ("0", "4"))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
for step in range(60):
    x = torch.randn(128, 32)
    y = (x @ teacher).argmax(-1)
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    if unscale:
        scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    if step % 10 == 9:
        print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():.0f}", flush=True)
