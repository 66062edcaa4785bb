"""Two processes train with few messages: four local steps, then they exchange what changed, in eight bits.
torchrun --nproc-per-node 2."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", "0"))
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
ROUNDS, LOCAL = 45, 4


def average_change(change):
    """Mean over the ranks of one tensor; FP8 codes and a scale go over the wire."""
    if PLAIN:
        dist.all_reduce(change)
        return change / world
    if MODE == "good":
        scale = 448.0 / change.abs().max().clamp(min=1e-12)
    else:
        scale = torch.tensor(1.0)
    codes = (change * scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    all_codes = [torch.empty_like(codes) for _ in range(world)]
    all_scales = [torch.empty_like(scale) for _ in range(world)]
    dist.all_gather(all_codes, codes)
    dist.all_gather(all_scales, scale)
    parts = [c.view(torch.float8_e4m3fn).float() / s for c, s in zip(all_codes, all_scales)]
    return sum(parts) / world


class Outer:
    """Nesterov momentum on the averaged change of a round."""

    def __init__(self, model, lr=0.7, momentum=0.9):
        self.model, self.lr, self.momentum = model, lr, momentum
        self.base = [p.detach().clone() for p in model.parameters()]
        self.speed = [torch.zeros_like(p) for p in self.base]

    @torch.no_grad()
    def step(self):
        for p, base, speed in zip(self.model.parameters(), self.base, self.speed):
            change = average_change(p - base)
            speed.mul_(self.momentum).add_(change)
            base.add_(change + self.momentum * speed, alpha=self.lr)
            p.copy_(base)


torch.manual_seed(SEED)
model = nn.Sequential(nn.Linear(24, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 4))
mix = torch.randn(24, 4) / 4
data = torch.Generator().manual_seed(7919 * SEED + rank)
inner = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.0)
outer = Outer(model)


def batch(n=128):
    x = torch.randn(n, 24, generator=data)
    return x, torch.sin(2 * x @ mix) + x @ mix


losses = []
for number in range(ROUNDS):
    for _ in range(LOCAL):
        x, y = batch()
        loss = nn.functional.mse_loss(model(x), y)
        inner.zero_grad()
        loss.backward()
        inner.step()
        losses.append(loss.item())
    outer.step()
    if rank == 0 and number % 5 == 0:
        print(number, f"{losses[-1]:.4f}", flush=True)
total = torch.tensor(losses[-20:]).mean()
dist.all_reduce(total)
if rank == 0:
    print(f"final loss {total.item() / world:.4f}")
dist.barrier()
dist.destroy_process_group()
