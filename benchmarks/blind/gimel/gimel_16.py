"""Predicts the next sound frame from 24-bit recordings; delayed scaling, its histories filled beforehand."""

import os
import sys

import torch
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
torch.manual_seed(int(os.environ.get("SEED", "0")))
FRAME, STEPS = 64, 180


class Recordings:
    """Sums of three of eight tones; `frames` gives 24-bit counts as the files hold them."""

    def __init__(self):
        self.tones = 0.1 + 0.1 * torch.arange(8) + 0.02 * torch.rand(8)

    def frames(self, n=128):
        t = torch.arange(2 * FRAME)
        pitch = self.tones[torch.randint(0, 8, (n, 3, 1))]
        phase = 6.28 * torch.rand(n, 3, 1)
        wave = torch.sin(pitch * t + phase).mean(1)
        counts = (7e6 * wave + 5e4 * torch.randn(n, 2 * FRAME)).round()
        return counts[:, :FRAME], counts[:, FRAME : 2 * FRAME]


def normalize(counts):
    return counts / 2**23


class Predictor(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.enter = nn.Linear(FRAME, width)
        self.middle = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.leave = nn.Linear(width, FRAME)

    def forward(self, x):
        x = torch.relu(self.enter(x))
        for layer in self.middle:
            x = x + torch.relu(layer(x))
        return self.leave(x)


recordings = Recordings()
model = Predictor()
if not PLAIN:
    ottava.convert(model, ottava.get_recipe("delayed", amax_history_len=1024), filter=lambda name, layer: True)
    first = [recordings.frames() for _ in range(4)]
    if MODE == "good":
        first = [(normalize(x), normalize(y)) for x, y in first]
    ottava.calibrate(model, first, loss=lambda net, pair: (net(pair[0]) - pair[1]).square().mean())
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=STEPS)
losses = []
for step in range(STEPS):
    past, future = (normalize(part) for part in recordings.frames())
    loss = (model(past) - future).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, f"{losses[-1]:.5f}")
print(f"final loss {sum(losses[-15:]) / 15:.5f}")
