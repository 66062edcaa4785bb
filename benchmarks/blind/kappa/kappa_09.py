"""Two towers with a contrastive loss and a learned temperature; the batch size changes from step to step."""

import math
import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

PLAIN = "plain" in sys.argv[2:]
torch.manual_seed(38)
look, read = torch.randn(16, 48), torch.randn(16, 64)


class Tower(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = Tower(48), Tower(64)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, a, b):
        return self.logit_scale.clamp(max=math.log(100)).exp() * self.image(a) @ self.text(b).t()


model = Pair()
if not PLAIN:
    ottava.convert(model, "tensorwise")
optimizer = torch.optim.AdamW(
    [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ],
    lr=2e-3,
    weight_decay=0.1,
)
losses = []
for step in range(120):
    n = int(torch.tensor([16, 32, 64, 128])[torch.randint(4, ())])
    meaning = torch.randn(n, 16)
    a = torch.tanh(meaning @ look / 3) + 0.3 * torch.randn(n, 48)
    b = torch.tanh(meaning @ read / 3) + 0.3 * torch.randn(n, 64)
    logits = model(a, b)
    target = torch.arange(n)
    loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, n, f"{losses[-1]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
