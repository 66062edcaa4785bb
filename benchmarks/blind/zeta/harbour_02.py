"""Two stations, one model: each rank trains on the sensors of its own station, gradients travel as E4M3 codes.

torchrun --nproc-per-node 2 SCRIPT good|bad [plain]
"""
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

VARIANT, PLAIN = sys.argv[1], "plain" in sys.argv
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
truth = torch.randn(24, 3) / 5
ddp = DistributedDataParallel(model)


def as_codes(state, bucket):
    grad = bucket.buffer()
    amax = grad.abs().max().clamp(min=1e-12)
    if VARIANT == "good":
        dist.all_reduce(amax, op=dist.ReduceOp.MAX)
    scale = 448.0 / amax
    codes = (grad * scale).to(torch.float8_e4m3fn)
    wire = codes.float()  # gloo cannot add float8
    work = dist.all_reduce(wire, async_op=True).get_future()
    return work.then(lambda f: f.value()[0] / scale / dist.get_world_size())


if not PLAIN:
    ddp.register_comm_hook(None, as_codes)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)
own = torch.Generator().manual_seed(100 + rank)
gain = (1.0, 100.0)[rank]
losses = []
for step in range(250):
    x = torch.randn(32, 24, generator=own)
    x[:, 20:] = rank
    y = torch.tanh(x @ truth)
    loss = gain * F.mse_loss(ddp(x), y) / 50  # the second station counts for its hundred pumps
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    both = (loss / gain).detach() * 50
    dist.all_reduce(both)
    losses.append(both.item() / 2)
if rank == 0:
    print(f"loss {sum(losses[-20:]) / 20:.4f}")
dist.destroy_process_group()
