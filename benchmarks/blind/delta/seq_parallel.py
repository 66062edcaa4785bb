import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import models

rank, world = models.start()


class Gather(torch.autograd.Function):
    """All positions; the gradient is summed over the ranks and cut."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(world, 1)[rank].contiguous()


class Scatter(torch.autograd.Function):
    """Sums over the ranks and keeps this rank's positions."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x.chunk(world, 1)[rank].contiguous()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(world)]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts, 1)


class Mlp(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        return x + Scatter.apply(self.down(F.gelu(self.up(Gather.apply(self.norm(x))))))


class Net(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.embed, self.norm = nn.Embedding(models.VOCAB, dim), nn.LayerNorm(dim)
        self.mlps, self.head = nn.Sequential(*(Mlp(dim) for _ in range(4))), nn.Linear(dim, models.VOCAB, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.mlps(self.embed(tokens.chunk(world, 1)[rank]))))


model = Net()
torch.manual_seed(10 + rank)
for mlp in model.mlps:
    mlp.up.reset_parameters()
    mlp.down.reset_parameters()
models.fp8(model, "tensorwise")
data = models.Text()
replicated = {n: p for n, p in model.named_parameters() if "up" not in n and "down" not in n}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(1, 101):
    tokens, target = data.batch()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), target.chunk(world, 1)[rank].flatten())
    optimizer.zero_grad()
    (loss / world).backward()
    for name, p in replicated.items():
        if not (models.BAD and "norm" in name):
            dist.all_reduce(p.grad)
    optimizer.step()
    models.say(step, loss)
