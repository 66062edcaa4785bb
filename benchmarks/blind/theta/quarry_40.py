"""Two backward passes for each step: weights are moved uphill, the gradient there is used, and they are moved back."""
import sys

import torch
from torch import nn

import ottava

PLAIN = "plain" in sys.argv[2:]
torch.manual_seed(64)
width, classes = 96, 20
model = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, classes))
if not PLAIN:
    ottava.convert(model, "tensorwise", filter=lambda name, layer: name == "3")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.12, step_size_up=20)
centres = torch.randn(classes, 64)
losses = []
for step in range(140):
    y = torch.randint(classes, (64,))
    x = centres[y] + 2.2 * torch.randn(64, 64)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moves = [p.grad * 0.05 / norm for p in model.parameters()]
        for p, move in zip(model.parameters(), moves):
            p.add_(move)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves):
            p.sub_(move)
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
