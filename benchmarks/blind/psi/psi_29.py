"""An autoregressive mixer of pixels with weights at unit scale (equalized learning rate), in BF16 with FP8 products."""
import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
DIM, LEVELS, HIDDEN, BATCH, STEPS = 48, 16, 128, 128, 160
F8 = torch.float8_e4m3fn


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-6).float() / 448
        return ((x / scale).to(F8).float() * scale).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Equal(nn.Module):
    """A linear layer whose weight is N(0, 1); the forward divides by the root of the width."""

    def __init__(self, a, b):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(b, a)), nn.Parameter(torch.zeros(b))
        self.gain = a**-0.5

    def forward(self, x):
        w = self.weight * self.gain
        if not plain:
            x, w = Round.apply(x), Round.apply(w)
        return F.linear(x, w, self.bias)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.fc1, self.fc2, self.head = (
            Equal(DIM, HIDDEN), Equal(HIDDEN, HIDDEN), Equal(HIDDEN, HIDDEN), Equal(HIDDEN, LEVELS)
        )

    def forward(self, x):
        h = F.gelu(self.stem(x))
        h = h + F.gelu(self.fc1(h))
        h = h + F.gelu(self.fc2(h))
        return self.head(h)


mixing = torch.randn(3, DIM)


def batch():
    context = torch.randn(BATCH, 3) @ mixing + 0.3 * torch.randn(BATCH, DIM)
    value = torch.sigmoid(context[:, :6].mean(-1) * 1.5 + torch.sin(context[:, 6] * 0.5))
    return context, (value * LEVELS).long().clamp(0, LEVELS - 1)


model = Net()
if mode == "bad":
    model.bfloat16()
optimizer = torch.optim.Adam(model.parameters(), lr=1.5e-3)
losses = []
for step in range(STEPS):
    x, y = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x.bfloat16())
    loss = F.cross_entropy(logits.float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 40 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
