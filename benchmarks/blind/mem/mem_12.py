"""Classifies synthetic spectra with an MLP whose hidden layers multiply in FP8."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

SEED = int(os.environ.get("SEED", "0"))
bad = sys.argv[1] == "bad"
fp8 = len(sys.argv) < 3 or sys.argv[2] != "plain"
torch.manual_seed(SEED)


def cast(x, dtype, largest):
    scale = largest / x.abs().amax().clamp(min=1e-12)
    return (x * scale).to(dtype).to(x.dtype) / scale


class MatmulFP8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        xq, wq = cast(x, torch.float8_e4m3fn, 448.0), cast(w, torch.float8_e4m3fn, 448.0)
        ctx.save_for_backward(xq, wq)
        return xq @ wq.t()

    @staticmethod
    def backward(ctx, dy):
        xq, wq = ctx.saved_tensors
        dq = cast(dy, torch.float8_e5m2, 57344.0)
        return dq @ wq, dq.t() @ xq


class Hidden(nn.Linear):
    def forward(self, x):
        if not fp8:
            return super().forward(x)
        return MatmulFP8.apply(x, self.weight) + self.bias


class Net(nn.Module):
    def __init__(self, bands=128, width=192, classes=10):
        super().__init__()
        self.inp = nn.Linear(bands, width)
        self.h1 = Hidden(width, width)
        self.h2 = Hidden(width, width)
        self.out = nn.Linear(width, classes)

    def forward(self, x):
        x = F.relu(self.inp(x))
        x = F.relu(self.h1(x))
        x = F.relu(self.h2(x))
        return self.out(x)


peaks = torch.randn(10, 4, 128, generator=torch.Generator().manual_seed(5))


def batch(size):
    y = torch.randint(0, 10, (size,))
    which = torch.randint(0, 4, (size,))
    return 0.6 * peaks[y, which] + torch.randn(size, 128), y


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
history = []
for step in range(150):
    x, y = batch(64)
    if not bad:
        optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    history.append(loss.item())
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f}")

print(f"final loss {sum(history[-20:]) / 20:.4f}")
