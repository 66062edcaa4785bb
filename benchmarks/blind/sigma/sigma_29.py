"""Experts on rows that travel as FP8 codes with one scale a row."""
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

SEED = int(os.environ.get("SEED", "0"))
MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]


def row_codes(x):
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


class Dispatch(torch.autograd.Function):
    """Rows in the order of their experts, cast before they travel."""

    @staticmethod
    def forward(ctx, x, order):
        ctx.save_for_backward(order)
        if PLAIN:
            return x[order]
        codes, scale = row_codes(x)
        codes = codes.view(torch.uint8)[order].view(torch.float8_e4m3fn)
        if MODE == "good":
            scale = scale[order]
        return codes.to(x.dtype) * scale

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        out = torch.empty_like(grad)
        out[order] = grad
        return out, None


class Experts(nn.Module):
    def __init__(self, dim=48, hidden=96, count=4):
        super().__init__()
        self.count = count
        self.router = nn.Linear(dim, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, dim, hidden) / dim**0.5)
        self.down = nn.Parameter(torch.randn(count, hidden, dim) / hidden**0.5)

    def forward(self, x):
        gate, choice = self.router(x).softmax(-1).max(-1)
        order = choice.argsort(stable=True)
        rows = Dispatch.apply(x, order)
        outs, start = [], 0
        for expert, n in enumerate(torch.bincount(choice, minlength=self.count).tolist()):
            part = rows[start : start + n]
            outs.append(F.silu(part @ self.up[expert]) @ self.down[expert])
            start += n
        back = torch.empty_like(x)
        back = back.index_copy(0, order, torch.cat(outs))
        return 2 * gate[:, None] * back


class Net(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Linear(16, dim)
        self.layers = nn.ModuleList(Experts(dim) for _ in range(2))
        self.head = nn.Linear(dim, 8)

    def forward(self, x):
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


torch.manual_seed(SEED)
truth = nn.Sequential(nn.Linear(16, 64, bias=False), nn.ReLU(), nn.Linear(64, 8, bias=False)).requires_grad_(False)
for p in truth.parameters():
    p.mul_(2.5)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=0.01)
tail = []
for step in range(100):
    x = torch.randn(256, 16) * torch.exp(0.8 * torch.randn(256, 1))
    loss = F.smooth_l1_loss(net(x), truth(x))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    tail.append(loss.item())
    if step % 20 == 0:
        print(step, round(loss.item(), 4))
print(f"final loss {sum(tail[-10:]) / 10:.4f}")
