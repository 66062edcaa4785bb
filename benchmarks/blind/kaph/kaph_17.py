"""Variational Monte Carlo: the ground state of two electrons in a harmonic trap, exact energy 3 hartree in FP64.

The samples come from the wave function itself. What goes into backward is a surrogate around 0; the energy is printed.
"""

import os

import torch
from torch import Tensor, nn

torch.set_default_dtype(torch.float64)
SEED = int(os.environ.get("SEED", "0"))
WALKERS, STEPS, EXACT = 256, 140, 3.0


class Wave(nn.Module):
    """log psi = - a r^2 / 2 summed, a cusp, and a small network of distances that is symmetric in the electrons."""

    def __init__(self) -> None:
        super().__init__()
        self.log_a = nn.Parameter(torch.tensor(0.3))
        self.net = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))

    def forward(self, r: Tensor) -> Tensor:
        first, second = r[:, :2], r[:, 2:]
        d1, d2 = first.square().sum(1), second.square().sum(1)
        gap = (first - second).square().sum(1).add(1e-12).sqrt()
        near = torch.stack([(1 + d1 + d2).log(), (d1 - d2).square() / (1 + d1 + d2), gap / (1 + gap)], 1)
        return -0.5 * self.log_a.exp() * (d1 + d2) + gap / (1 + gap) + self.net(near).squeeze(1)


def local_energy(wave: Wave, r: Tensor) -> Tensor:
    """-1/2 (laplacian log psi + |grad log psi|^2) + r^2 / 2 + 1 / r12, in two dimensions."""
    r = r.detach().requires_grad_()
    log_psi = wave(r)
    (slope,) = torch.autograd.grad(log_psi.sum(), r, create_graph=True)
    bend = torch.zeros(len(r))
    for k in range(4):
        bend = bend + torch.autograd.grad(slope[:, k].sum(), r, retain_graph=True)[0][:, k]
    gap = (r[:, :2] - r[:, 2:]).square().sum(1).sqrt()
    kinetic = -0.5 * (bend + slope.square().sum(1))
    return (kinetic + 0.5 * r.square().sum(1) + 1.0 / gap).detach()


@torch.no_grad()
def walk(wave: Wave, r: Tensor, moves: int) -> tuple[Tensor, float]:
    """Metropolis moves; the share that was accepted is returned, too."""
    log_psi, accepted = wave(r), 0.0
    for _ in range(moves):
        proposed = r + 0.5 * torch.randn_like(r)
        log_new = wave(proposed)
        take = torch.rand(len(r)).log() < 2 * (log_new - log_psi)
        r, log_psi = torch.where(take[:, None], proposed, r), torch.where(take, log_new, log_psi)
        accepted += float(take.double().mean()) / moves
    return r, accepted


def excess(wave: Wave, r: Tensor) -> tuple[float, Tensor]:
    """Energy above the exact one, from 16 fresh sets of walkers."""
    energies = []
    for _ in range(16):
        r, _ = walk(wave, r, 6)
        energies.append(local_energy(wave, r).mean())
    return float(torch.stack(energies).mean()) - EXACT, r


def main() -> None:
    torch.manual_seed(SEED)
    wave = Wave()
    optimizer = torch.optim.Adam(wave.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + step / 40))
    r, _ = walk(wave, torch.randn(WALKERS, 4), 100)
    first, r = excess(wave, r)
    print(f"first loss {first:.4f}")
    for step in range(STEPS):
        r, accepted = walk(wave, r, 6)
        energy = local_energy(wave, r)
        middle = energy.median()
        spread = (energy - middle).abs().mean()
        clipped = energy.clamp(middle - 5 * spread, middle + 5 * spread)
        surrogate = 2.0 * ((clipped - clipped.mean()) * wave(r)).mean()
        optimizer.zero_grad()
        surrogate.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(f"step {step} energy {energy.mean():.4f} variance {energy.var():.4f} accepted {accepted:.2f}")
    final, _ = excess(wave, r)
    print(f"final loss {final:.4f}")


if __name__ == "__main__":
    main()
