"""Contrastive pairs with a batch that doubles twice: the loss jumps because there are more wrong answers. FP8 by hand, gradients too."""
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)


def fp8(t, dtype=torch.float8_e4m3fn):
    top = torch.finfo(dtype).max
    scale = top / t.abs().amax().clamp(min=1e-30)
    return (t * scale).clamp(-top, top).to(dtype).to(t.dtype) / scale


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = fp8(x), fp8(w)
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = fp8(dy, torch.float8_e5m2)
        return dy @ w, dy.t() @ x


class Linear8(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else Product.apply(x, self.weight) + self.bias


def tower(wide):
    return nn.Sequential(Linear8(wide, 128), nn.GELU(), Linear8(128, 64))


image, text = tower(48), tower(32)
heat = nn.Parameter(torch.tensor(2.0))
optimizer = torch.optim.AdamW([*image.parameters(), *text.parameters(), heat], lr=2e-3)
views = torch.randn(12, 48), torch.randn(12, 32)
losses = []
for step in range(90):
    n = 32 if step < 30 else 64 if step < 60 else 128
    z = torch.randn(n, 12)
    a = F.normalize(image(z @ views[0] + torch.randn(n, 48)), dim=-1)
    b = F.normalize(text(z @ views[1] + torch.randn(n, 32)), dim=-1)
    logits = a @ b.t() * heat.exp()
    y = torch.arange(n)
    loss = (F.cross_entropy(logits, y) + F.cross_entropy(logits.t(), y)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
