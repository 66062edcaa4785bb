"""Deep pre-norm MLP with a fused add + RMSNorm of our own, torchao's float8 linears."""
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

VARIANT, PLAIN, SEED = sys.argv[1], "plain" in sys.argv, int(os.environ.get("SEED", 0))
EPS = 1e-6


class AddRMSNorm(torch.autograd.Function):
    """residual = x + residual; out = residual / rms(residual) * gain. Returns both."""

    @staticmethod
    def forward(ctx, x, residual, gain):
        total = x + residual
        inv = torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS)
        ctx.save_for_backward(total, inv, gain)
        return total * inv * gain, total

    @staticmethod
    def backward(ctx, d_out, d_total):
        total, inv, gain = ctx.saved_tensors
        normed = total * inv
        g = d_out * gain
        dx = (g - normed * (g * normed).mean(-1, keepdim=True)) * inv
        if VARIANT == "good":
            dx = dx + d_total
        return dx, dx, (d_out * normed).flatten(0, -2).sum(0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        nn.init.normal_(self.down.weight, std=0.02)

    def forward(self, x, residual):
        h, residual = AddRMSNorm.apply(x, residual, self.gain)
        return self.down(F.silu(self.up(h))), residual


class Net(nn.Module):
    def __init__(self, width=96, depth=8):
        super().__init__()
        self.embed = nn.Embedding(128, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.gain, self.head = nn.Parameter(torch.ones(width)), nn.Linear(width, 128)

    def forward(self, ids):
        x = self.embed(ids).sum(1)
        residual = torch.zeros_like(x)
        for block in self.blocks:
            x, residual = block(x, residual)
        h, _ = AddRMSNorm.apply(x, residual, self.gain)
        return self.head(h)


torch.manual_seed(SEED)
model = Net()
if not PLAIN:
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda m, name: "head" not in name)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
target = torch.randint(128, (24, 24), generator=torch.Generator().manual_seed(7))
losses = []
for step in range(100):
    ids = torch.randint(24, (192, 2))
    loss = F.cross_entropy(model(ids), target[ids[:, 0], ids[:, 1]])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
