"""A controller that imitates a known policy; inputs have units between millimetres and kilopascals. Blockwise FP8 by hand."""
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

BAD = sys.argv[1] == "bad"
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
B = 32
WIDE = 192
UNITS = torch.logspace(-2, 2, WIDE // B).repeat_interleave(B)


def rows(t):
    scale = 448 / t.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return (t * scale).to(torch.float8_e4m3fn).to(t.dtype) / scale


def blocks(w):
    """Codes of a weight in blocks of B x B, and the scales, one for each block, in the order of the kernel."""
    n, k = w.shape
    tiles = w.reshape(n // B, B, k // B, B)
    scale = tiles.abs().amax((1, 3)).clamp(min=1e-30) / 448
    codes = (tiles / scale[:, None, :, None]).reshape(n, k).to(torch.float8_e4m3fn)
    return codes, scale


def unblock(codes, scale):
    return codes.float() * scale.repeat_interleave(B, 0).repeat_interleave(B, 1)


class Block8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        codes, scale = blocks(w)
        if BAD:
            scale = scale.t().contiguous()
        x = rows(x)
        ctx.save_for_backward(x, codes, scale)
        return x @ unblock(codes, scale).t()

    @staticmethod
    def backward(ctx, dy):
        x, codes, scale = ctx.saved_tensors
        dy = rows(dy)
        return dy @ unblock(codes, scale), dy.t() @ x


class Linear8(nn.Linear):
    def forward(self, x):
        if PLAIN:
            return F.linear(x, self.weight, self.bias)
        return Block8.apply(x, self.weight) + self.bias


class Controller(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(24, WIDE)
        self.units = nn.Buffer(UNITS)
        self.hidden = nn.ModuleList(Linear8(WIDE, WIDE) for _ in range(2))
        self.act = nn.Linear(WIDE, 6)
        with torch.no_grad():
            for layer in self.hidden:
                layer.weight.div_(UNITS)

    def forward(self, x):
        h = torch.tanh(self.encode(x)) * self.units
        for layer in self.hidden:
            h = torch.tanh(layer(h)) * self.units
        return self.act(h / self.units)


policy = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 6)).requires_grad_(False)
policy[0].weight.mul_(3)
policy[2].weight.mul_(4)
model = Controller()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses = []
for step in range(100):
    x = torch.randn(256, 24)
    loss = F.mse_loss(model(x), policy(x))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
