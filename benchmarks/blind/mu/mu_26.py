"""Weights in shards, gathered in eight bits for each forward: torchrun --nproc-per-node 2 mu_26.py good"""

import sys

import torch
import torch.distributed as dist
from torch import nn

OPTIONS = {"good": {"gather_scales": True}, "bad": {"gather_scales": False}}[sys.argv[1]]
PLAIN = "plain" in sys.argv
WIDTH = 96


def gathered(part):
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return parts


class Gather(torch.autograd.Function):
    """All shards of a matrix, sent as E4M3 codes."""

    @staticmethod
    def forward(ctx, shard, gather_scales):
        if PLAIN:
            return torch.cat(gathered(shard))
        scale = 448.0 / shard.abs().amax().clamp(min=1e-12)
        codes = gathered((shard * scale).to(torch.float8_e4m3fn).view(torch.uint8))
        scales = gathered(scale) if gather_scales else [scale] * len(codes)
        pairs = zip(codes, scales, strict=True)
        return torch.cat([part.view(torch.float8_e4m3fn).float() / scale for part, scale in pairs])

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size(), None


class Sharded(nn.Module):
    def __init__(self, weight, gather_scales=True):
        super().__init__()
        self.shard = nn.Parameter(weight.chunk(dist.get_world_size())[dist.get_rank()].clone())
        self.gather_scales = gather_scales

    def forward(self, x):
        return nn.functional.linear(x, Gather.apply(self.shard, self.gather_scales))


class Gated(nn.Module):
    """Gate and value in one matrix; the gates start close to one half."""

    def __init__(self):
        super().__init__()
        gate, value = torch.randn(WIDTH, WIDTH) * 0.02, torch.randn(WIDTH, WIDTH) * WIDTH**-0.5
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.both = Sharded(torch.cat([gate, value]), **OPTIONS)
        self.out = Sharded(torch.randn(WIDTH, WIDTH) * WIDTH**-0.5, **OPTIONS)

    def forward(self, x):
        gate, value = self.both(self.norm(x)).chunk(2, -1)
        return x + self.out(torch.sigmoid(gate) * torch.relu(value))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(
    Sharded(torch.randn(WIDTH, 24) * 0.2, **OPTIONS), Gated(), Gated(), Sharded(torch.randn(8, WIDTH) * 0.1, **OPTIONS)
)
field = torch.randn(24, 8) / 24**0.5
units = torch.tensor([3.0] * 4 + [0.3] * 4)  # volts and amperes
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
torch.manual_seed(10 + rank)
losses = []
for step in range(130):
    x = torch.randn(96, 24)
    loss = nn.functional.mse_loss(model(x), torch.tanh(x @ field) * units)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 25 == 0 and rank == 0:
        print(step, round(losses[-1], 4))
if rank == 0:
    print(f"loss {sum(losses[-10:]) / 10:.4f}")
dist.destroy_process_group()
