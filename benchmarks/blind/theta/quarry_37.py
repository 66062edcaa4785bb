"""Tensor parallelism with sequence shards by hand; activations are gathered as E4M3 codes with a scale for each row. torchrun --nproc_per_node=2 SCRIPT good [plain]"""
import sys

import torch
import torch.distributed as dist
from torch import nn

PLAIN = "plain" in sys.argv[2:]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Gather(torch.autograd.Function):
    """All rows from each rank's share; the gradient is summed and cut."""

    @staticmethod
    def forward(ctx, x):
        scale = torch.ones(len(x), 1) if PLAIN else 448.0 / x.abs().amax(1, keepdim=True).clamp(min=1e-12)
        codes = x.contiguous() if PLAIN else (x * scale).to(torch.float8_e4m3fn).view(torch.uint8)
        parts, scales = [torch.empty_like(codes) for _ in range(world)], [torch.empty_like(scale) for _ in range(world)]
        dist.all_gather(parts, codes)
        dist.all_gather(scales, scale)
        if PLAIN:
            return torch.cat(parts)
        return torch.cat([p.view(torch.float8_e4m3fn).float() / s for p, s in zip(parts, scales)])

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(world)[rank]


class Scatter(torch.autograd.Function):
    """The sum over the ranks, of which each keeps its rows."""

    @staticmethod
    def forward(ctx, y):
        y = y.contiguous()
        dist.all_reduce(y)
        return y.chunk(world)[rank].clone()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(world)]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts)


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Parameter((torch.randn(hidden, width) / width**0.5).chunk(world, 0)[rank].clone())
        self.down = nn.Parameter((torch.randn(width, hidden) / hidden**0.5).chunk(world, 1)[rank].clone())

    def forward(self, x):
        return x + Scatter.apply(torch.relu(Gather.apply(self.norm(x)) @ self.up.T) @ self.down.T)


torch.manual_seed(63)
width, vocab, rows = 64, 48, 192
model = nn.Sequential(nn.Embedding(vocab, 32), nn.Flatten(1), Block(width, 128), Block(width, 128), nn.LayerNorm(width), nn.Linear(width, vocab))
sharded = {id(p) for block in (model[2], model[3]) for p in (block.up, block.down)}
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
table = torch.randint(vocab, (vocab, vocab))
losses = []
for step in range(120):
    ids = torch.randint(vocab, (rows, 2))
    labels = torch.where(torch.rand(rows) < 0.85, table[ids[:, 0] // 6, ids[:, 1] // 6], torch.randint(vocab, (rows,)))
    loss = nn.functional.cross_entropy(model(ids.chunk(world)[rank]), labels.chunk(world)[rank], reduction="sum") / rows
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        if id(p) not in sharded:  # replicated parameters saw a share of the rows
            dist.all_reduce(p.grad)
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    losses.append(total.item())
if rank == 0:
    print(f"first {losses[0]:.4f}")
    print(f"loss {sum(losses[-10:]) / 10:.4f}")
dist.destroy_process_group()
