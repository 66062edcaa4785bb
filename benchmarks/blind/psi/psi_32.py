"""One model learns four domains one after the other under accelerate; each change is a jump."""
import os
import sys
import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F
import ottava
from accelerate import Accelerator
from ottava.doors.accelerate import prepare

warnings.filterwarnings("ignore")
mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
DIM, CLASSES, BATCH, STEPS, DOMAINS = 48, 24, 64, 200, 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(DIM, 96)
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(96) for _ in range(3))
        self.head = nn.Linear(96, CLASSES)

    def forward(self, x):
        h = self.stem(x)
        for norm, layer in zip(self.norms, self.layers):
            h = h + F.gelu(layer(norm(h)))
        return self.head(h)


centers = torch.randn(DOMAINS, CLASSES * 2, DIM)
loudness = [1.0, 4.0, 0.5, 2.0]
noise = [0.8, 1.2, 1.0, 1.6]


def batch(step):
    d = step * DOMAINS // STEPS
    kind = torch.randint(0, CLASSES * 2, (BATCH,))
    x = (centers[d, kind] + noise[d] * torch.randn(BATCH, DIM)) * loudness[d]
    return x, kind % CLASSES


accelerator = Accelerator(cpu=True)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
if plain:
    model, optimizer = accelerator.prepare(model, optimizer)
else:
    model, optimizer = prepare(accelerator, model, optimizer, recipe="mxfp8")
losses = []
for step in range(STEPS):
    x, y = batch(step)
    loss = F.cross_entropy(model(x), y)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
