"""Copying digits through a deep MLP, with a hand-written float8 linear: codes once in forward, reused in backward."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

VARIANT, PLAIN = sys.argv[1], "plain" in sys.argv
torch.manual_seed(12)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def quantize(x, dtype):
    scale = torch.finfo(dtype).max / x.abs().max().clamp(min=1e-12)
    return (x * scale).to(dtype), scale


class Matmul8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        xq, sx = quantize(x, E4M3)
        wq, sw = quantize(w, E4M3)
        # the backward GEMM wants (in, out) row-major
        wt = wq.float().t().contiguous() if VARIANT == "good" else wq.float().reshape(w.shape[1], w.shape[0])
        ctx.save_for_backward(xq, sx, wt.to(E4M3), sw)
        return (xq.float() @ wq.float().t()) / (sx * sw)

    @staticmethod
    def backward(ctx, grad):
        xq, sx, wt, sw = ctx.saved_tensors
        gq, sg = quantize(grad, E5M2)
        dx = (gq.float() @ wt.float().t()) / (sg * sw)
        dw = (gq.float().t() @ xq.float()) / (sg * sx)
        return dx, dw


class Linear8(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else Matmul8.apply(x, self.weight) + self.bias


model = nn.Sequential(
    Linear8(80, 96), nn.LayerNorm(96), nn.GELU(), Linear8(96, 160), nn.LayerNorm(160), nn.GELU(),
    Linear8(160, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for step in range(350):
    digits = torch.randint(0, 10, (64, 8))
    x = F.one_hot(digits, 10).float().flatten(1)
    loss = F.cross_entropy(model(x), digits[torch.arange(64), digits[:, 0] % 4 + 1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-20:]) / 20:.4f}")
