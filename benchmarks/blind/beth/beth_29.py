"""Energies of small molecules in hartree with a graph network: targets near 1e-3, so a loss below 1e-5.

Adam's epsilon is chosen for gradients of that size. Atoms of all molecules of a batch lie in one list; bonds are pairs of
places in it. The linears cast rows and gradients to FP8 by hand, each with the scale of its own amax.
"""

import os

import torch
from torch import nn

SEED = int(os.environ.get("SEED", "0"))
KINDS, WIDTH, STEPS, BATCH = 6, 64, 220, 48


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    top = x.abs().amax()
    scale = torch.where(top > 0, torch.finfo(dtype).max / top, torch.ones_like(top))
    return (x * scale).to(dtype).to(x.dtype) / scale


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = rounded(x, torch.float8_e4m3fn), rounded(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad = rounded(grad, torch.float8_e5m2)
        return grad @ w, grad.T @ x


class Linear8(nn.Linear):
    def forward(self, x):
        return Product.apply(x, self.weight) + self.bias


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.atoms = nn.Embedding(KINDS, WIDTH)
        self.messages = nn.ModuleList(Linear8(2 * WIDTH, WIDTH) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.read = nn.Sequential(Linear8(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def forward(self, kinds, bonds, owner, count):
        h = self.atoms(kinds)
        for message, norm in zip(self.messages, self.norms):
            sent = torch.nn.functional.silu(message(torch.cat([h[bonds[0]], h[bonds[1]]], -1)))
            h = norm(h + torch.zeros_like(h).index_add(0, bonds[1], sent))
        return torch.zeros(count).index_add(0, owner, 1e-3 * self.read(h)[:, 0])


def molecules(count: int, pair: torch.Tensor, own: torch.Tensor, g: torch.Generator):
    """Trees with some rings; the energy is a sum over atoms and bonds."""
    kinds, bonds, owner, energies = [], [], [], torch.zeros(count)
    place = 0
    for k in range(count):
        size = int(torch.randint(5, 12, (1,), generator=g))
        kind = torch.randint(0, KINDS, (size,), generator=g)
        edges = {(int(torch.randint(0, a, (1,), generator=g)), a) for a in range(1, size)} | {(0, size - 1)}
        a, b = (torch.tensor(side) for side in zip(*sorted(edges)))
        energies[k] = own[kind].sum() + pair[kind[a], kind[b]].sum()
        kinds.append(kind)
        bonds.append(torch.stack([torch.cat([a, b]), torch.cat([b, a])]) + place)
        owner.append(torch.full((size,), k))
        place += size
    return (torch.cat(kinds), torch.cat(bonds, 1), torch.cat(owner), count), energies


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(SEED + 6)
    pair = 1e-3 * torch.randn(KINDS, KINDS, generator=g)
    pair, own = (pair + pair.T) / 2, 5e-4 * torch.randn(KINDS, generator=g)
    batches = [molecules(BATCH, pair, own, g) for _ in range(24)]
    held, energies = molecules(200, pair, own, g)

    net = Energy()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, eps=1e-14)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    @torch.no_grad()
    def loss_of_held() -> float:
        return nn.functional.mse_loss(net(*held), energies).item()

    print(f"first loss {loss_of_held():.4e}")
    for step in range(STEPS):
        graph, target = batches[step % len(batches)]
        loss = nn.functional.mse_loss(net(*graph), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(f"{step:4d}  {loss.item():.3e}")
    print(f"final loss {loss_of_held():.4e}")


if __name__ == "__main__":
    main()
