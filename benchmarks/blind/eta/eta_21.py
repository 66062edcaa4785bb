"""Two ranks that average their gradients by hand, FP8 with scales per row."""

import sys

import torch
import torch.distributed as dist
from torch import nn

import ottava

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(35)
dist.init_process_group("gloo")
rank = dist.get_rank()
teacher = nn.Sequential(nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 32))
torch.manual_seed(100 if mode == "good" else 100 + rank)
model = nn.Sequential(nn.Linear(48, 160), nn.GELU(), nn.Linear(160, 160), nn.GELU(), nn.Linear(160, 32))
if not plain:
    print(ottava.convert(model, "rowwise"))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
source = torch.Generator().manual_seed(7 + rank)
losses = []
for step in range(160):
    x = torch.randn(64, 48, generator=source)
    with torch.no_grad():
        y = 3 * teacher(x)
    loss = (model(x) - y).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0 and rank == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
if rank == 0:
    print(f"loss {sum(losses[-20:]) / 20:.4f}")
dist.destroy_process_group()
