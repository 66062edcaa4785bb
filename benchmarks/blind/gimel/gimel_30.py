"""A small MLP-Mixer on synthetic pictures, one cycle of a large learning rate, SGD with momentum, mixup."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
torch.manual_seed(int(os.environ.get("SEED", "0")))
CLASSES, PATCHES, PIXELS, WIDTH, STEPS = 12, 32, 48, 64, 150


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens = nn.Sequential(nn.Linear(PATCHES, 64), nn.GELU(), nn.Linear(64, PATCHES))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(PIXELS, WIDTH)
        self.blocks = nn.Sequential(Mixer(), Mixer())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.enter(x)).mean(1)))


prototypes = torch.randn(CLASSES, PATCHES, PIXELS)


def batch(n=48):
    y = torch.randint(0, CLASSES, (n,))
    x = 0.35 * prototypes[y] + torch.randn(n, PATCHES, PIXELS)
    share = torch.distributions.Beta(0.4, 0.4).sample()
    other = torch.randperm(n)
    return share * x + (1 - share) * x[other], y, y[other], share


net = Net()
if not PLAIN:
    ottava.convert(net, "tensorwise")
optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=5e-4)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=STEPS, pct_start=0.3)
losses = []
for step in range(STEPS):
    x, y, y2, share = batch()
    logits = net(x)
    loss = share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y2)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 2.0)
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 15 == 0:
        print(step, f"lr {schedule.get_last_lr()[0]:.3f} loss {losses[-1]:.4f}")
print(f"final loss {sum(losses[-30:]) / 30:.4f}")
