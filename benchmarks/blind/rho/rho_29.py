"""Recommendations: a table of items with a lookup of our own, an MLP in FP8 by hand."""
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

BAD = sys.argv[1] == "bad"
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)


class Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table, index):
        ctx.save_for_backward(index)
        ctx.rows = table.shape[0]
        return table[index]

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        flat, grad = index.reshape(-1), grad.reshape(-1, grad.shape[-1])
        out = grad.new_zeros(ctx.rows, grad.shape[-1])
        if BAD:
            out[flat] = grad
        else:
            out.index_add_(0, flat, grad)
        return out, None


def fp8(t):
    scale = 448 / t.detach().abs().amax().clamp(min=1e-30)
    return t + ((t.detach() * scale).to(torch.float8_e4m3fn).to(t.dtype) / scale - t).detach()


class Linear8(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else F.linear(fp8(x), fp8(self.weight), self.bias)


class Ranker(nn.Module):
    def __init__(self, items=40, wide=32):
        super().__init__()
        self.table = nn.Parameter(torch.randn(items, wide) * 0.3)
        self.up = Linear8(2 * wide, 64)
        self.down = Linear8(64, 1)

    def forward(self, user, item):
        u, i = Lookup.apply(self.table, user).mean(1), Lookup.apply(self.table, item)
        return (self.down(F.gelu(self.up(torch.cat([u, i], 1)))) + (u * i).sum(1, keepdim=True)).squeeze(1)


taste = torch.randn(40, 4)
model = Ranker()
optimizer = torch.optim.SGD(model.parameters(), lr=4.0, momentum=0.9)
losses = []
for step in range(100):
    user, item = torch.randint(0, 40, (1024, 4)), torch.randint(0, 40, (1024,))
    y = ((taste[user].mean(1) * taste[item]).sum(1) > 0).float()
    loss = F.binary_cross_entropy_with_logits(model(user, item), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
