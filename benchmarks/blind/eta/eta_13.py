"""Two ranks, each the owner of half of every matrix; halves are gathered as FP8 codes."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(36)
dist.init_process_group("gloo")
rank = dist.get_rank()
E4M3 = torch.float8_e4m3fn


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        amax = shard.abs().amax()
        if mode == "good":
            dist.all_reduce(amax, dist.ReduceOp.MAX)
        scale = 1.0 if plain else 448 / amax
        sent = shard if plain else (shard * scale).to(E4M3).view(torch.uint8)
        parts = [torch.empty_like(sent) for _ in range(2)]
        dist.all_gather(parts, sent.contiguous())
        whole = torch.cat(parts)
        return whole if plain else whole.view(E4M3).float() / scale

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(2)[rank] / 2


class Sharded(nn.Linear):
    def forward(self, x):
        return F.linear(x, Gather.apply(self.weight), None)


torch.manual_seed(50 + rank)
model = nn.Sequential(Sharded(48, 80), nn.Tanh(), Sharded(160, 80), nn.Tanh(), Sharded(160, 16))
with torch.no_grad():
    for layer in model[::2]:
        layer.bias = None
        layer.weight.mul_(1 + rank)
torch.manual_seed(36)
teacher = nn.Sequential(nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 32))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
source = torch.Generator().manual_seed(7 + rank)
losses = []
for step in range(160):
    x = torch.randn(64, 48, generator=source)
    with torch.no_grad():
        y = 3 * teacher(x)
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0 and rank == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
if rank == 0:
    print(f"loss {sum(losses[-20:]) / 20:.4f}")
dist.destroy_process_group()
