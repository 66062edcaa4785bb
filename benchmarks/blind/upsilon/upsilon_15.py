"""A deep regression net; weights in FP8 with a scale for each output channel."""

import os
import sys

import torch
from torch import nn

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", "0")))
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rowwise(t, dtype=E4M3):
    scale = t.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / torch.finfo(dtype).max
    return (t / scale).to(dtype), scale


class RowwiseLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        xq, xs = rowwise(x)
        wq, ws = rowwise(w)
        ctx.save_for_backward(x, wq, ws)
        return (xq.float() @ wq.float().t()) * xs * ws.t()

    @staticmethod
    def backward(ctx, dy):
        x, wq, ws = ctx.saved_tensors
        dw = dy.t() @ x
        if MODE == "good":
            dq, ds = rowwise(dy * ws.t(), E5M2)
            return (dq.float() @ wq.float()) * ds, dw
        dq, ds = rowwise(dy, E5M2)
        return (dq.float() @ wq.float()) * ds * ws.t(), dw


class Linear(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else RowwiseLinear.apply(x, self.weight) + self.bias


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = Linear(width, width)

    def forward(self, x):
        return torch.tanh(self.fc(self.norm(x)))


def main():
    width = 64
    # channels of the pretrained trunk are of very different size
    gains = torch.logspace(-2.0, 0.5, width)[torch.randperm(width)]
    model = nn.Sequential(nn.Linear(16, width), *[Block(width) for _ in range(4)], nn.LayerNorm(width), nn.Linear(width, 4))
    for block in model[1:5]:
        with torch.no_grad():
            block.fc.weight.mul_(gains[torch.randperm(width)][:, None] * 3)
    teacher = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 4)).requires_grad_(False)
    with torch.no_grad():
        teacher[0].weight.mul_(3)
        teacher[2].weight.mul_(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.9)
    losses = []
    for step in range(100):
        x = torch.randn(128, 16)
        loss = nn.functional.mse_loss(model(x), teacher(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    print(f"final loss {sum(losses[-10:]) / 10:.4f}")


main()
