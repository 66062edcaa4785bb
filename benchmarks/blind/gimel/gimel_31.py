"""Gradient accumulation with accelerate: sixteen small batches make one step of SGD. FP8 by torchao, emulated."""

import dataclasses
import os
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
torch.manual_seed(int(os.environ.get("SEED", "0")))
STEPS, PARTS, BATCH = 70, 16, 16


class Score(nn.Module):
    """Scores a molecule from 64 descriptors."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(64, 128)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 128)) for _ in range(2)
        )
        self.leave = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 1))

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x).squeeze(1)


slope = torch.randn(64, 3) / 8


class Molecules(torch.utils.data.Dataset):
    def __init__(self, n):
        self.x = torch.randn(n, 64)
        self.y = 3 * (self.x @ slope).tanh().sum(1) + 0.1 * torch.randn(n)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


accelerator = Accelerator(cpu=True)
model = Score()
if not PLAIN:
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: module.out_features > 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.8)
loader = torch.utils.data.DataLoader(Molecules(STEPS * PARTS * BATCH), batch_size=BATCH, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

losses, seen = [], 0.0
for number, (x, y) in enumerate(loader, 1):
    if MODE == "bad":
        optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss / PARTS)
    seen += loss.item() / PARTS
    if number % PARTS == 0:
        optimizer.step()
        if MODE == "good":
            optimizer.zero_grad()
        losses.append(seen)
        seen = 0.0
        if len(losses) % 10 == 0:
            print(len(losses), f"{losses[-1]:.4f}")
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
