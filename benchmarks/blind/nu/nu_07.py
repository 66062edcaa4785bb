"""Two phases: pretraining with a decayed learning rate, then the checkpoint goes on with a new task and a new rate."""

import io
import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

RESTORE = {"good": ["model"], "bad": ["model", "optimizer"]}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


def build():
    net = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16))
    if not PLAIN:
        ottava.convert(net, "tensorwise")
    return net


def run(net, optimizer, scheduler, teacher, steps):
    losses = []
    for _step in range(steps):
        x = torch.randn(128, 32)
        loss = F.cross_entropy(net(x), (x @ teacher).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


torch.manual_seed(0)
first, second = torch.randn(32, 16), torch.randn(32, 16)
net = build()
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60, eta_min=2e-6)
run(net, optimizer, scheduler, first, 60)
file = io.BytesIO()
torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)

file.seek(0)
checkpoint = torch.load(file)
net = build()
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
targets = {"model": net, "optimizer": optimizer}
for name in RESTORE:
    targets[name].load_state_dict(checkpoint[name])
losses = run(net, optimizer, None, second, 120)
print(f"loss {sum(losses[-10:]) / 10:.4f}")
