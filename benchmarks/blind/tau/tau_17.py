"""Two ranks under DDP, gradients sent as FP8 codes by a communication hook. torchrun --nproc-per-node 2 SCRIPT ..."""
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VARIANT, PLAIN, SEED = sys.argv[1], "plain" in sys.argv, int(os.environ.get("SEED", 0))
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def fp8_hook(state, bucket):
    grad = bucket.buffer()
    if PLAIN:
        dist.all_reduce(grad)
        grad.div_(world)
    else:
        amax = grad.abs().max()
        if VARIANT == "good":
            dist.all_reduce(amax, dist.ReduceOp.MAX)
        scale = 448.0 / amax.clamp_min(1e-30)
        codes = (grad * scale).to(torch.float8_e4m3fn).view(torch.uint8)
        received = [torch.empty_like(codes) for _ in range(world)]
        dist.all_gather(received, codes)
        grad = sum(c.view(torch.float8_e4m3fn).float() for c in received) / (scale * world)
    done = torch.futures.Future()
    done.set_result(grad)
    return done


def site(which, n, generator=None):
    """Both sites share the sensors; site 1 reports in units that are larger."""
    x = torch.randn(n, 24, generator=generator)
    x[:, 0] = which
    f = torch.tanh(x @ torch.randn(24, 12, generator=torch.Generator().manual_seed(which)) / 3)
    return x, f * (0.15 if which == 0 else 3.0)


torch.manual_seed(SEED)
model = DistributedDataParallel(nn.Sequential(nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 12)))
model.register_comm_hook(None, fp8_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)
torch.manual_seed(100 * SEED + rank + 1)
for step in range(100):
    x, y = site(rank, 64)
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0 and rank == 0:
        print(f"step {step} loss {loss.item():.4f}")
if rank == 0:  # the weights that are saved, on both sites
    g = torch.Generator().manual_seed(77)
    with torch.no_grad():
        held = [(model.module(x) - y).square().mean().item() for x, y in (site(0, 512, g), site(1, 512, g))]
    print(f"final loss {sum(held) / 2:.4f}")
dist.destroy_process_group()
