"""Residual blocks with dropout and activation checkpointing; FP8 linears by hand."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PRESERVE_RNG = {"good": True, "bad": False}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


def rounded(x, dtype):
    if PLAIN:
        return x
    scale = torch.finfo(dtype).max / x.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return (x * scale).to(dtype).float() / scale


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        x, weight = rounded(x, torch.float8_e4m3fn), rounded(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = rounded(grad, torch.float8_e5m2)
        return grad @ weight, grad.t() @ x


class Linear(nn.Linear):
    def forward(self, x):
        return Product.apply(x, self.weight) + self.bias


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), Linear(dim, 2 * dim), Linear(2 * dim, dim)

    def forward(self, x):
        x = F.dropout(x, 0.3, self.training)
        return x + self.down(F.dropout(F.relu(self.up(self.norm(x))), 0.5, self.training))


class Net(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.first, self.last = nn.Linear(64, dim), nn.Linear(dim, 30)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=PRESERVE_RNG)
        return self.last(x)


torch.manual_seed(73)
centres = torch.randn(60, 64)
names = torch.randint(30, (60,))
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for _ in range(160):
    which = torch.randint(60, (96,))
    loss = F.cross_entropy(model(centres[which] + 0.7 * torch.randn(96, 64)), names[which])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
