"""A deep residual-free MLP whose weights are cast in square blocks of 32, once for both GEMMs."""
import os
import sys

import torch
from torch import nn

SEED = int(os.environ.get("SEED", "0"))
MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
B = 32
FP8 = torch.float8_e4m3fn


def block_cast(w):
    n, k = w.shape
    blocks = w.reshape(n // B, B, k // B, B)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448
    codes = (blocks / scale[:, None, :, None]).to(FP8).reshape(n, k)
    return codes, scale


def decode(codes, scale):
    n, k = codes.shape
    return (codes.float().reshape(n // B, B, k // B, B) * scale[:, None, :, None]).reshape(n, k)


def row_cast(x, dtype=FP8):
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / torch.finfo(dtype).max
    return (x / scale).to(dtype).float() * scale


class BlockMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        codes, scale = block_cast(w)
        xq = row_cast(x)
        ctx.save_for_backward(xq, codes.view(torch.uint8), scale)
        return xq @ decode(codes, scale).t()

    @staticmethod
    def backward(ctx, g):
        xq, codes, scale = ctx.saved_tensors
        gq = row_cast(g)
        turned = codes.t().contiguous().view(FP8)
        wt = decode(turned, scale.t() if MODE == "good" else scale)
        return gq @ wt.t(), gq.t() @ xq


class Layer(nn.Module):
    def __init__(self, width, gains):
        super().__init__()
        w = torch.empty(width, width)
        nn.init.orthogonal_(w)
        self.weight = nn.Parameter(w * gains.repeat_interleave(width // len(gains))[None, :])
        self.bias = nn.Parameter(torch.zeros(width))
        self.out_gain = 1.0

    def forward(self, x):
        y = x @ self.weight.t() if PLAIN else BlockMM.apply(x, self.weight)
        return torch.tanh(y + self.bias)


class Net(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.bands = torch.tensor([1.0, 10.0, 0.3, 4.0])
        self.stem = nn.Linear(20, width)
        self.layers = nn.ModuleList(Layer(width, 1.5 / self.bands) for _ in range(4))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        scale = self.bands.repeat_interleave(32)
        h = torch.tanh(self.stem(x)) * scale
        for layer in self.layers[:-1]:
            h = layer(h) * scale
        return self.head(self.layers[-1](h))


torch.manual_seed(SEED)
teacher = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 4)).requires_grad_(False)
for p in teacher.parameters():
    p.mul_(2.5)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9)
losses = []
for step in range(100):
    x = torch.randn(128, 20)
    loss = (net(x) - teacher(x)).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 2.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, losses[-1])
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
