"""Trains a small mixer on one plant's data, then goes on with another plant's at a gentle rate."""

import os
import sys
import tempfile

import torch
from torch import nn
from torch.nn import functional as F

import ottava

bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
torch.set_num_threads(1)

FIRST, SECOND, BATCH, TIMES, CHANNELS = 120, 80, 48, 12, 32
RATE, GENTLE = 4e-3, 1e-3


class Mixer(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(CHANNELS) for _ in range(2 * layers))
        self.time = nn.ModuleList(nn.Linear(TIMES, TIMES) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(CHANNELS, 96) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(96, CHANNELS) for _ in range(layers))
        self.head = nn.Linear(CHANNELS, 1)

    def forward(self, x):
        for i, (time, up, down) in enumerate(zip(self.time, self.up, self.down)):
            x = x + time(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + down(F.gelu(up(self.norms[2 * i + 1](x))))
        return self.head(x.mean(1))[:, 0]


world = torch.Generator().manual_seed(13)
taste = torch.randn(2, CHANNELS, generator=world) / 3


def batch(plant):
    x = torch.randn(BATCH, TIMES, CHANNELS)
    y = 2 * torch.tanh(x.mean(1) @ taste[plant] * 2) + torch.relu(x[:, -4:]).mean(1) @ taste[0]
    return x, y + (0.2 if plant else 0.05) * torch.randn(BATCH)


def train(model, optimizer, plant, steps, schedule=None):
    losses = []
    for step in range(steps):
        x, y = batch(plant)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if schedule:
            schedule.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"plant {plant} step {step} loss {losses[-1]:.4f}")
    return losses


model = Mixer()
if not plain:
    ottava.convert(model, "rowwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
train(model, optimizer, 0, FIRST, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, FIRST, 1e-6))
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "first.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    saved = torch.load(path)

model.load_state_dict(saved["model"])
optimizer = torch.optim.AdamW(model.parameters(), lr=GENTLE)
optimizer.load_state_dict(saved["optimizer"])
if not bad:
    for group in optimizer.param_groups:
        group["lr"] = GENTLE
losses = train(model, optimizer, 1, SECOND)
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
