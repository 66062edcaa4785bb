"""Data parallel by hand on two ranks: sum the gradients, divide, step. Float8 linears.

torchrun --nproc-per-node 2 SCRIPT good|bad [plain]
"""
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import ottava

VARIANT, PLAIN = sys.argv[1], "plain" in sys.argv
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1234 if VARIANT == "good" else 1234 + rank)
model = nn.Sequential(
    nn.Linear(32, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 32)
)
if not PLAIN:
    ottava.convert(model, "tensorwise")
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
turn = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)))[0]
data = torch.Generator().manual_seed(500 + rank)
losses = []
for step in range(200):
    x = torch.randn(32, 32, generator=data)
    loss = F.mse_loss(model(x), torch.tanh(x @ turn) * x.roll(1, 1))
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
    losses.append(loss.item())
if rank == 0:
    print(f"loss {sum(losses[-20:]) / 20:.4f}")
dist.destroy_process_group()
