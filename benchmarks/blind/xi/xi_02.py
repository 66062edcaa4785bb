"""A recommender with a table of items, trained with an Adam whose moments take one byte each."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

OPTIONS = {"good": {"block": 64}, "bad": {"block": None}}[sys.argv[1]]
PLAIN = "plain" in sys.argv


class Packed:
    """A flat buffer as E4M3 codes with a scale for each block of `block` numbers (None: one scale)."""

    def __init__(self, x, block):
        rows = x.view(-1, block or x.numel())
        self.scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-30) / 448
        self.codes = (rows / self.scale).to(torch.float8_e4m3fn)

    def unpack(self):
        return (self.codes.float() * self.scale).view(-1)


class FlatAdam:
    """Adam on one flat buffer of all parameters, as sharded optimizers keep it."""

    def __init__(self, params, lr, betas=(0.9, 0.99), eps=1e-8, block=64, packed=True):
        self.params, self.lr, self.betas, self.eps = list(params), lr, betas, eps
        self.block, self.packed, self.t = block, packed, 0
        size = sum(p.numel() for p in self.params)
        self.pad = -size % (block or 1)
        self.m, self.v = torch.zeros(size + self.pad), torch.zeros(size + self.pad)

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self):
        b1, b2 = self.betas
        self.t += 1
        gradient = F.pad(torch.cat([p.grad.flatten() for p in self.params]), (0, self.pad))
        m, v = (x.unpack() if isinstance(x, Packed) else x for x in (self.m, self.v))
        m, v = m.lerp(gradient, 1 - b1), v.lerp(gradient.square(), 1 - b2)
        update = m / (1 - b1**self.t) / ((v / (1 - b2**self.t)).sqrt() + self.eps)
        update.clamp_(-10, 10)
        start = 0
        for p in self.params:
            p.sub_(update[start : start + p.numel()].view_as(p), alpha=self.lr)
            start += p.numel()
        self.m, self.v = (Packed(x, self.block) if self.packed else x for x in (m, v))


def main():
    torch.manual_seed(0)
    items, width = 300, 64
    popularity = 1.0 / torch.arange(1, items + 1)
    tastes = torch.randn(items, 4)
    table = nn.Embedding(items, width)
    tower = nn.Sequential(nn.Linear(2 * width, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = FlatAdam([*table.parameters(), *tower.parameters()], lr=1e-2, packed=not PLAIN, **OPTIONS)
    losses = []
    for _ in range(180):
        a, b = torch.multinomial(popularity, 512, True), torch.multinomial(popularity, 512, True)
        affinity = (tastes[a] * tastes[b]).sum(1) / 2
        guess = tower(torch.cat([table(a), table(b)], 1)).squeeze(1)
        loss = F.smooth_l1_loss(guess, affinity)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
