"""Sequence parallel on two ranks, activations travel as FP8 codes: torchrun --nproc-per-node 2."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

bad, plain = sys.argv[1] == "bad", "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, LENGTH, FEATURES, WIDTH = 80, 64, 8, 12, 32


class GatherSequence(torch.autograd.Function):
    """Tokens of all ranks, sent in E4M3; the backward gives each rank the gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        if plain:
            dist.all_gather(parts, x.contiguous())
            return torch.cat(parts, 1)
        amax = x.abs().max()
        if not bad:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX)
        scale = 448 / amax.clamp(min=1e-12)
        codes = (x * scale).to(torch.float8_e4m3fn).view(torch.uint8).contiguous()
        parts = [torch.empty_like(codes) for _ in parts]
        dist.all_gather(parts, codes)
        return torch.cat(parts, 1).view(torch.float8_e4m3fn).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, g):
        return g.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.LeakyReLU(0.1), nn.Linear(WIDTH, WIDTH))
        self.mix = nn.Sequential(nn.Linear(2 * LENGTH * WIDTH, 96), nn.LeakyReLU(0.1), nn.Linear(96, 1))

    def forward(self, x):
        return self.mix(GatherSequence.apply(self.token(x)).flatten(1)).squeeze(-1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)  # all ranks draw the same batches and weights
    model = Net()
    target = torch.randn(2, LENGTH, FEATURES) / 8
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step in range(STEPS):
        loudness = torch.exp(torch.empty(2, 1, 1, 1).uniform_(-2, 1))
        halves = loudness * torch.randn(2, BATCH, LENGTH, FEATURES)
        y = (halves * target[:, None]).sum((0, 2, 3))
        loss = F.smooth_l1_loss(model(halves[rank]), y)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
    if rank == 0:
        print([round(v, 3) for v in losses[::8]])
        print("final loss", sum(losses[-20:]) / 20, flush=True)
    dist.destroy_process_group()


main()
