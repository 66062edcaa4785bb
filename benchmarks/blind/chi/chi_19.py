"""Two ranks, data parallel by hand: gradients travel as FP8 codes. torchrun --nproc-per-node 2 SCRIPT good|bad [plain]"""
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()


def codes(x, scale):
    return (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn)


@torch.no_grad()
def average(parameters):
    """Sums the gradients of all ranks: codes are gathered as bytes and added up in FP32."""
    for p in parameters:
        if PLAIN:
            dist.all_reduce(p.grad)
            p.grad /= WORLD
            continue
        amax = p.grad.abs().amax().clamp(min=1e-12)
        if MODE == "good":
            dist.all_reduce(amax, op=dist.ReduceOp.MAX)
        scale = 448.0 / amax
        mine = codes(p.grad, scale).view(torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(WORLD)]
        dist.all_gather(parts, mine)
        total = sum(part.view(torch.float8_e4m3fn).float() for part in parts)
        p.grad.copy_(total / scale / WORLD)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 4))

    def forward(self, x):
        return self.body(x)


g = torch.Generator().manual_seed(50 + SEED)
truth = torch.randn(32, 4, generator=g) / 5.6
bend = torch.randn(32, 4, generator=g) / 5.6
own = torch.Generator().manual_seed(500 + 10 * SEED + RANK)


def batch(generator, site, n=64):
    """Each site sees its half of the inputs; the meters of the second one are noisier."""
    x = torch.randn(n, 32, generator=generator)
    x[:, 0] = x[:, 0].abs() * (1 if site == 0 else -1)
    y = torch.sin(x @ truth) + (x @ bend).abs() + 2 * x[:, :1]
    return x, y + (0.05 if site == 0 else 3.0) * torch.randn(n, 4, generator=generator)


def held_out():
    x = torch.randn(1000, 32, generator=g)
    return x, torch.sin(x @ truth) + (x @ bend).abs() + 2 * x[:, :1]


torch.manual_seed(SEED)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 150)
test_x, test_y = held_out()
for step in range(150):
    x, y = batch(own, RANK)
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    average(list(model.parameters()))
    optimizer.step()
    schedule.step()
    if RANK == 0 and step % 25 == 0:
        print(step, round(loss.item(), 4))
with torch.no_grad():
    error = F.mse_loss(model(test_x), test_y)
dist.all_reduce(error)
if RANK == 0:
    print("final loss", round(error.item() / WORLD, 4))
dist.destroy_process_group()
