"""Classifies recordings of 20 frames with an LSTM; the projections around it run in FP8."""

import os
import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", "0"))
torch.manual_seed(SEED)
FRAMES, BANDS, CLASSES, STEPS = 20, 32, 6, 140


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(BANDS, 64), nn.GELU())
        self.lstm = nn.LSTM(64, 64, batch_first=MODE == "good")
        self.leave = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, CLASSES))

    def forward(self, frames):
        states, _ = self.lstm(self.enter(frames))
        return self.leave(states[:, -1])


patterns = torch.randn(4, BANDS)
orders = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]


def recordings(n):
    y = torch.randint(0, CLASSES, (n,))
    x = 0.5 * torch.randn(n, FRAMES, BANDS)
    for i in range(n):
        at = torch.randperm(FRAMES - 4)[:3].sort().values
        for place, which in zip(at, orders[y[i]]):
            x[i, place] += 1.5 * patterns[which]
    return x, y


accelerator = Accelerator(cpu=True)
model = Recognizer()
if not PLAIN:
    ottava.convert(model, "rowwise")
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(*recordings(2048)), batch_size=64, shuffle=True, drop_last=True
)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

losses, step = [], 0
while step < STEPS:
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        step += 1
        if step % 20 == 0:
            print(step, f"{losses[-1]:.4f}")
        if step == STEPS:
            break
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
