"""Data parallel by hand on two ranks; gradients are summed as FP8. torchrun --nproc-per-node 2"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", "0"))


def all_reduce_fp8(grad, world):
    top = torch.finfo(torch.float8_e5m2).max / world
    amax = grad.abs().amax().clamp(min=1e-20)
    if MODE == "good":
        dist.all_reduce(amax, op=dist.ReduceOp.MAX)
    scale = top / amax
    codes = (grad * scale).to(torch.float8_e5m2).float()
    dist.all_reduce(codes)
    return codes / scale / world


def domain(rank, generator, count):
    """Each rank reads a corpus of its own: gauges of site 0 are faint, those of site 1 loud."""
    x = torch.randn(count, 32, generator=generator) * (0.15, 1.6)[rank]
    return x


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    teacher = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 8))
    with torch.no_grad():
        teacher[0].weight.mul_(4)
        teacher[2].weight.mul_(6)
    for tensor in [*model.parameters(), *teacher.parameters()]:
        dist.broadcast(tensor.data, 0)
    generator = torch.Generator().manual_seed(100 * SEED + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.9)
    for step in range(100):
        x = domain(rank, generator, 64)
        with torch.no_grad():
            y = teacher(x)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            if PLAIN:
                dist.all_reduce(p.grad)
                p.grad /= world
            else:
                p.grad = all_reduce_fp8(p.grad, world)
        optimizer.step()
        if step % 10 == 0 and rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    with torch.no_grad():
        held = torch.cat([domain(r, generator, 512) for r in range(world)])
        score = nn.functional.mse_loss(model(held), teacher(held))
    dist.all_reduce(score)
    if rank == 0:
        print(f"final loss {score.item() / world:.4f}", flush=True)
    dist.destroy_process_group()


main()
