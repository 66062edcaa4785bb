"""Lion on an MLP mixer; FP8 copies of the weights are kept between steps and made anew when a weight changes."""
import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
TOKENS, DIM, CLASSES, BATCH, STEPS = 16, 32, 10, 64, 150
F8 = torch.float8_e4m3fn


def encode(x):
    scale = x.abs().amax().clamp(min=1e-12) / 448
    return (x / scale).to(F8), scale


def decode(code, scale):
    return code.float() * scale


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, code, scale):
        x8, w = decode(*encode(x)), decode(code, scale)
        ctx.save_for_backward(x8, w)
        return x8 @ w.T

    @staticmethod
    def backward(ctx, grad):
        x8, w = ctx.saved_tensors
        return grad @ w, grad.flatten(0, -2).T @ x8.flatten(0, -2), None, None


class Linear8(nn.Linear):
    cached = None

    def forward(self, x):
        if plain:
            return super().forward(x)
        if self.cached is None or self.cached[0] != self.weight._version:
            self.cached = (self.weight._version, *encode(self.weight.detach()))
        return Product.apply(x, self.weight, *self.cached[1:]) + self.bias


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.t1, self.t2 = Linear8(TOKENS, 64), Linear8(64, TOKENS)
        self.c1, self.c2 = Linear8(DIM, 64), Linear8(64, DIM)

    def forward(self, x):
        y = self.n1(x).transpose(1, 2)
        x = x + self.t2(F.gelu(self.t1(y))).transpose(1, 2)
        return x + self.c2(F.gelu(self.c1(self.n2(x))))


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            a, b = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                update = (a * m + (1 - a) * p.grad).sign()
                if mode == "bad":
                    p.data.add_(update, alpha=-group["lr"])
                else:
                    p.add_(update, alpha=-group["lr"])
                m.mul_(b).add_(p.grad, alpha=1 - b)


prototypes = torch.randn(CLASSES, 4, TOKENS, DIM)


def batch():
    y = torch.randint(0, CLASSES, (BATCH,))
    kind = torch.randint(0, 4, (BATCH,))
    return prototypes[y, kind] + 2.0 * torch.randn(BATCH, TOKENS, DIM), y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixers, self.norm, self.head = nn.Sequential(Mixer(), Mixer()), nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES)

    def forward(self, x):
        return self.head(self.norm(self.mixers(x)).mean(1))


model = Net()
optimizer = Lion(model.parameters(), lr=1e-3)
losses = []
for step in range(STEPS):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 30 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
