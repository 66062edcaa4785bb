"""A deep MLP whose weights are held as E4M3 codes with one scale for each 32x32 block."""
import sys

import torch
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
BACKWARD = {"good": "codes.T, scales.T", "bad": "codes.T, scales"}[MODE]
B = 32


def quantize(w):
    blocks = w.unflatten(0, (-1, B)).unflatten(2, (-1, B)).transpose(1, 2)
    scales = blocks.abs().amax((2, 3)).clamp(min=1e-12) / 448.0
    codes = blocks / scales[:, :, None, None]
    return codes.to(torch.float8_e4m3fn).float().transpose(1, 2).reshape(w.shape), scales


def dequantize(codes, scales):
    return codes * scales.repeat_interleave(B, 0).repeat_interleave(B, 1)


class BlockLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        codes, scales = (w, torch.ones(w.shape[0] // B, w.shape[1] // B)) if PLAIN else quantize(w)
        ctx.save_for_backward(x, codes, scales)
        return x @ dequantize(codes, scales).T

    @staticmethod
    def backward(ctx, grad):
        x, codes, scales = ctx.saved_tensors
        transposed = dequantize(codes.T, scales.T if BACKWARD.endswith(".T") else scales)
        return grad @ transposed.T, grad.T @ x


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        gain = torch.exp(torch.randn(width // B, width // B) * 2.0).repeat_interleave(B, 0).repeat_interleave(B, 1)
        gain = gain / gain.square().mean().sqrt()
        self.weight = nn.Parameter(torch.randn(width, width) * gain * (2.0 / width) ** 0.5)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return torch.relu(BlockLinear.apply(self.norm(x), self.weight))


torch.manual_seed(3)
width, classes = 128, 16
centres = torch.randn(classes * 8, 32)
lift = torch.randn(32, width) / 5
model = nn.Sequential(nn.Linear(width, width), *(Layer(width) for _ in range(4)), nn.LayerNorm(width), nn.Linear(width, classes))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
losses = []
for step in range(180):
    y = torch.randint(classes * 8, (128,))
    x = (centres[y] + 0.8 * torch.randn(128, 32)) @ lift
    loss = nn.functional.cross_entropy(model(x), y % classes)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
