"""Share of ill patches in a slide: attention pooling over large bags, with the weights of the pooling in 8 bits."""
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)

BAG, FEATURES, STEPS, BATCH = 4000, 16, 140, 4
direction = torch.randn(FEATURES)
direction /= direction.norm()


def batch():
    share = torch.rand(BATCH)
    ill = torch.rand(BATCH, BAG) < share[:, None]
    x = 1.5 * torch.randn(BATCH, BAG, FEATURES) + ill.float()[..., None] * direction * 3
    return x, 2 * share


class Cast8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def cast(x, top=None):
    if plain:
        return x
    scale = 448 / top if top is not None else 1.0
    return Cast8.apply(x, scale)


class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(FEATURES, 32)
        self.gate = nn.Linear(32, 32)
        self.score = nn.Linear(32, 1)
        self.head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        h = F.gelu(self.encode(x))
        weight = torch.softmax(self.score(torch.tanh(self.gate(h))).squeeze(-1), -1)
        values = cast(h, h.detach().abs().amax())
        weight = cast(weight, 1.0 if mode == "good" else None)
        return self.head(torch.einsum("bn,bnd->bd", weight, values)).squeeze(-1)


model = Pool()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
losses = []
for step in range(STEPS):
    x, shares = batch()
    loss = F.mse_loss(model(x), shares)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {np.mean(losses[-20:]):.4f}")
