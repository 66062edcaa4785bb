"""Data parallel on two ranks with a communication hook that sends gradients as FP8 codes.

torchrun --nproc_per_node 2 nu_13.py good
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RESCALE_EVERY = {"good": 1, "bad": 1000}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


class Compressor:
    def __init__(self):
        self.scales, self.calls = {}, {}

    def scale(self, parameter, gradient):
        calls = self.calls.get(parameter, 0)
        self.calls[parameter] = calls + 1
        if calls % RESCALE_EVERY == 0:
            amax = gradient.abs().amax()
            dist.all_reduce(amax, op=dist.ReduceOp.MAX)
            self.scales[parameter] = 240 / amax.clamp(min=1e-20)
        return self.scales[parameter]

    def hook(self, state, bucket):
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            scale = self.scale(parameter, gradient)
            codes = (gradient * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            gathered = [torch.empty_like(codes.view(torch.uint8)) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, codes.view(torch.uint8))
            total = sum(g.view(torch.float8_e4m3fn).float() for g in gathered) / len(gathered)
            gradient.copy_(total / scale)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8))
nn.init.zeros_(net[4].weight)
teacher, mix = torch.randn(32, 12) / 4, torch.randn(12, 8) / 2
model = DistributedDataParallel(net)
if not PLAIN:
    model.register_comm_hook(None, Compressor().hook)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
generator = torch.Generator().manual_seed(10 + rank)
losses = []
for _step in range(200):
    x = torch.randn(128, 32, generator=generator)
    y = F.relu(x @ teacher) @ mix
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
if rank == 0:
    print(f"loss {sum(losses[-10:]) / 10:.4f}")
dist.destroy_process_group()
