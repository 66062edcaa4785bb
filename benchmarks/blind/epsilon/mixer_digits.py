"""MLP-mixer on drawn glyphs; activations and gradients go through FP8."""
import sys

import torch
import torch.nn.functional as F
from torch import nn

from models import E4M3, E5M2, Report, round_fp8

BAD = sys.argv[1] == "bad"


def cast_gradient(g):
    if BAD:
        return g.to(E4M3).float()
    return round_fp8(g, E5M2)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = round_fp8(x), round_fp8(w)
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        g = cast_gradient(g)
        return g @ w, g.flatten(0, -2).t() @ x.flatten(0, -2)


class Dense(nn.Linear):
    def forward(self, x):
        return Product.apply(x, self.weight) + self.bias


class MixerLayer(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.token = nn.Sequential(Dense(tokens, 2 * tokens), nn.GELU(), Dense(2 * tokens, tokens))
        self.channel = nn.Sequential(Dense(dim, 2 * dim), nn.GELU(), Dense(2 * dim, dim))

    def forward(self, x):
        x = x + self.token(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel(self.n2(x))


class Mixer(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.patch = nn.Linear(16, dim)
        self.layers = nn.ModuleList(MixerLayer(16, dim) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)

    def forward(self, image):
        x = image.unfold(1, 4, 4).unfold(2, 4, 4).reshape(len(image), 16, 16)
        x = self.patch(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


torch.manual_seed(0)
glyphs = F.interpolate(torch.randn(10, 1, 5, 5), size=(16, 16), mode="bilinear")[:, 0]


def draw(n):
    y = torch.randint(0, 10, (n,))
    shifts = torch.randint(-4, 5, (n, 2)).tolist()
    image = torch.stack([glyphs[c].roll(tuple(s), (0, 1)) for c, s in zip(y.tolist(), shifts)])
    return image + 0.7 * torch.randn_like(image), y


model = Mixer()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
report = Report()
for step in range(100):
    image, y = draw(96)
    loss = F.cross_entropy(model(image), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    report.add(loss)
report.end()
