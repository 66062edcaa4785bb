"""Two towers score pairs of customer and article. Activations are cast to FP8 with the scale of the step before."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
torch.manual_seed(int(os.environ.get("SEED", "0")))
STEPS, BATCH = 180, 256


class Registry:
    """Largest magnitudes by name; a cast uses what the last step has seen under its name."""

    def __init__(self):
        self.amax = {}

    def cast(self, name, t):
        seen = t.detach().abs().max()
        scale = 448.0 / self.amax.get(name, seen).clamp(min=1e-12)
        self.amax[name] = seen
        q = (t.detach() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale
        return t + (q - t).detach()


registry = Registry()


class Linear(nn.Linear):
    def __init__(self, fan_in, fan_out, name):
        super().__init__(fan_in, fan_out)
        self.name = name

    def forward(self, x):
        if not PLAIN:
            x = registry.cast(self.name, x)
        return super().forward(x)


class Tower(nn.Module):
    def __init__(self, name, fan_in, width=96):
        super().__init__()
        prefix = f"{name}." if MODE == "good" else ""
        self.fc1 = Linear(fan_in, width, prefix + "fc1")
        self.fc2 = Linear(width, width, prefix + "fc2")
        self.fc3 = Linear(width, 32, prefix + "fc3")
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x):
        x = F.gelu(self.norm1(self.fc1(x)))
        x = F.gelu(self.norm2(self.fc2(x)))
        return self.fc3(x)


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.customer, self.article = Tower("customer", 24), Tower("article", 24)

    def forward(self, customer, article):
        return (self.customer(customer) * self.article(article)).sum(1) / 32**0.5


taste = torch.randn(24, 24) / 5


def batch():
    spends = 800 * torch.randn(BATCH, 24)  # what the customer spends, in euros
    contains = 0.004 * torch.randn(BATCH, 24)  # what the article contains, in kg
    score = (torch.tanh(spends / 400) @ taste * contains / 0.004).sum(1)
    return spends, contains, (score > 0).float()


model = TwoTowers()
with torch.no_grad():
    model.article.fc1.weight *= 50
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
losses = []
for step in range(STEPS):
    spends, contains, bought = batch()
    loss = F.binary_cross_entropy_with_logits(model(spends, contains), bought)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, f"{losses[-1]:.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
