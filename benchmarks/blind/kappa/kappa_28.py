"""Data parallel regression; gradients travel in eight bits. torchrun --nproc_per_node=2"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SCALING = {"good": "bucket", "bad": "off"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


def eight_bits(group, bucket):
    grad = bucket.buffer()
    scale = torch.ones(())
    if SCALING == "bucket":
        scale = 448 / grad.abs().amax().clamp(min=1e-20)
    codes = (grad * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    everyone = [torch.empty_like(grad, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    scales = [torch.empty(1) for _ in everyone]
    dist.all_gather(everyone, codes.view(torch.uint8))
    dist.all_gather(scales, scale.view(1))
    parts = [c.view(torch.float8_e4m3fn).float() / s for c, s in zip(everyone, scales, strict=True)]
    mean = torch.stack(parts).mean(0)
    future = torch.futures.Future()
    future.set_result(mean)
    return future


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(5)
teacher = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 64))
model = nn.Sequential(nn.Linear(40, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64))
model = DistributedDataParallel(model)
if not PLAIN:
    model.register_comm_hook(None, eight_bits)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
data = torch.Generator().manual_seed(100 + rank)
losses = []
for step in range(120):
    x = torch.randn(64, 40, generator=data)
    with torch.no_grad():
        y = teacher(x)
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0 and rank == 0:
        print(step, f"{losses[-1]:.4f}")
if rank == 0:
    print(f"loss {sum(losses[-10:]) / 10:.4f}")
dist.destroy_process_group()
