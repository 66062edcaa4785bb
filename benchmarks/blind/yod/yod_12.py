"""A bandit with a bootstrapped ensemble: eight small nets, each with a frozen random prior beside it, choose what to try.

    python yod_12.py good

The store of experiences grows while the nets learn from it. Each experience counts for about half of the nets. The rounding to
FP8 is done here, with a scale for each net.
"""

import os

import torch
from torch import nn

SEED = int(os.environ.get("SEED", "0"))
NETS, CONTEXT, ARMS, DIM, ROUNDS = 8, 16, 6, 48, 260


class Round(torch.autograd.Function):
    """E4M3 on the way forward or E5M2 on the way back."""

    @staticmethod
    def forward(ctx, x, back):
        ctx.back = back
        return x.clone() if back else to_eight(x, torch.float8_e4m3fn)

    @staticmethod
    def backward(ctx, error):
        return to_eight(error, torch.float8_e5m2) if ctx.back else error, None


def to_eight(x, kind):
    scale = torch.finfo(kind).max / x.abs().amax((1, 2), keepdim=True).clamp(min=1e-12)
    return (x * scale).to(kind).to(x.dtype) / scale


class Many(nn.Module):
    """One linear layer of each net."""

    def __init__(self, inputs, outputs, cast):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NETS, inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(NETS, 1, outputs))
        self.cast = cast

    def forward(self, x):
        if not self.cast:
            return torch.baddbmm(self.bias, x, self.weight)
        return Round.apply(torch.bmm(Round.apply(x, False), Round.apply(self.weight, False)), True) + self.bias


def nets(cast):
    return nn.Sequential(Many(CONTEXT, DIM, False), nn.ReLU(), Many(DIM, DIM, cast), nn.ReLU(), Many(DIM, ARMS, False))


class Ensemble(nn.Module):
    def __init__(self):
        super().__init__()
        self.learned, self.prior = nets(True), nets(False)
        self.prior.requires_grad_(False)
        with torch.no_grad():
            self.learned[4].weight.mul_(0.1)

    def forward(self, x):
        x = x.expand(NETS, *x.shape[-2:])
        return self.learned(x) + 0.3 * self.prior(x)


class World:
    def __init__(self, generator):
        self.generator = generator
        self.one = torch.randn(CONTEXT, 12, generator=generator) / CONTEXT**0.5
        self.two = torch.randn(12, ARMS, generator=generator) / 2

    def contexts(self, count):
        return torch.randn(count, CONTEXT, generator=self.generator)

    def value(self, x):
        return torch.tanh(1.5 * x @ self.one) @ self.two


def regret(model, world, held):
    model.eval()
    with torch.no_grad():
        chosen = model(held).mean(0).argmax(1)
    model.train()
    value = world.value(held)
    return (value.amax(1) - value[torch.arange(len(held)), chosen]).mean().item()


def main():
    torch.manual_seed(SEED)
    world = World(torch.Generator().manual_seed(600 + SEED))
    held, model = world.contexts(2000), Ensemble()
    optimizer = torch.optim.Adam(model.learned.parameters(), lr=3e-3)
    store = None
    print(f"first loss {regret(model, world, held):.4f}")
    for turn in range(ROUNDS):
        x = world.contexts(24)
        with torch.no_grad():
            believed = model(x)[torch.randint(NETS, (24,)), torch.arange(24)]  # each context asks one net
        arm = believed.argmax(1)
        reward = world.value(x)[torch.arange(24), arm] + 0.2 * torch.randn(24)
        new = (x, arm, reward, (torch.rand(24, NETS) < 0.5).float())
        store = new if store is None else tuple(torch.cat(pair) for pair in zip(store, new))
        for _ in range(1 if turn < 10 else 2):
            pick = torch.randint(len(store[0]), (128,))
            x, arm, reward, counts = (part[pick] for part in store)
            guess = model(x)[:, torch.arange(128), arm]
            loss = (counts.T * (guess - reward).square()).sum() / counts.sum()
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
        if turn % 30 == 0:
            print(f"round {turn} store {len(store[0])} loss {loss.item():.4f} regret {regret(model, world, held):.4f}")
    print(f"final loss {regret(model, world, held):.4f}")


main()
