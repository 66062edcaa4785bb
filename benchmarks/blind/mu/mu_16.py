"""DDP whose gradients travel in eight bits: torchrun --nproc-per-node 2 mu_16.py good"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

OPTIONS = {"good": {"scaled": True}, "bad": {"scaled": False}}[sys.argv[1]]
PLAIN = "plain" in sys.argv


def eight_bits(options, bucket):
    """Sends E5M2 codes of a bucket and returns the mean of all ranks."""
    grad = bucket.buffer()
    scale = torch.ones(())
    if options["scaled"]:
        amax = grad.abs().amax()
        dist.all_reduce(amax, dist.ReduceOp.MAX)
        scale = 57344.0 / amax.clamp(min=1e-30)
    codes = (grad * scale).clamp(-57344, 57344).to(torch.float8_e5m2).view(torch.uint8)
    everyone = [torch.empty_like(codes) for _ in range(dist.get_world_size())]
    work = dist.all_gather(everyone, codes, async_op=True)

    def mean(_):
        return sum(part.view(torch.float8_e5m2).float() for part in everyone) / (scale * len(everyone))

    return work.get_future().then(mean)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(24, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 64))
field = torch.randn(24, 64) / 24**0.5
model = DistributedDataParallel(net, bucket_cap_mb=0.05)
if not PLAIN:
    model.register_comm_hook(OPTIONS, eight_bits)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-12)
torch.manual_seed(50 + rank)
losses = []
for step in range(150):
    x = torch.randn(128, 24)
    volts = torch.tanh(x @ field) * 2e-2
    loss = nn.functional.mse_loss(model(x), volts)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item() * 1e4)
    if step % 25 == 0 and rank == 0:
        print(step, round(losses[-1], 4))
if rank == 0:
    print(f"loss {sum(losses[-10:]) / 10:.4f}")
dist.destroy_process_group()
