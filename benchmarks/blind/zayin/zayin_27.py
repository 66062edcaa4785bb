"""A Fourier neural operator for Burgers' equation: weights in the spectral layers are complex numbers.

The linear layers at each point pass inputs and weights through E4M3 by hand; the spectral layers do not.

python zayin_27.py good|bad
"""

import os

import torch
from torch import nn

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
POINTS, MODES, WIDTH = 64, 12, 32


def solutions(count, nu=0.02, seconds=0.6, ticks=300):
    """Periodic start values and the solution later on, by a pseudo-spectral scheme in FP64."""
    k = 2 * torch.pi * torch.fft.rfftfreq(POINTS, 1 / POINTS).double()
    modes = torch.zeros(count, POINTS // 2 + 1, dtype=torch.cdouble)
    modes[:, 1:5] = torch.randn(count, 4, dtype=torch.cdouble) * POINTS / torch.tensor([3.0, 5.0, 8.0, 12.0])
    keep = torch.arange(POINTS // 2 + 1) < POINTS // 3
    u, dt = modes.clone(), seconds / ticks
    for _ in range(ticks):
        square = torch.fft.rfft(torch.fft.irfft(u, n=POINTS).square())
        u = (u - dt * 0.5j * k * square * keep) / (1 + dt * nu * k.square())
    return torch.fft.irfft(modes, n=POINTS).float(), torch.fft.irfft(u, n=POINTS).float()


class Fp8Point(nn.Linear):
    """A linear layer at each point; both operands are rounded to E4M3 with a scale a tensor, gradients go straight."""

    @staticmethod
    def rounded(x):
        scale = 448 / x.detach().abs().amax().clamp_min(1e-12)
        return x + ((x.detach() * scale).to(torch.float8_e4m3fn).float() / scale - x.detach())

    def forward(self, x):
        return nn.functional.linear(self.rounded(x), self.rounded(self.weight), self.bias)


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, MODES, dtype=torch.cfloat) / WIDTH)

    def forward(self, x):
        modes = torch.fft.rfft(x, dim=1)[:, :MODES]
        return torch.fft.irfft(torch.einsum("bmi,iom->bmo", modes, self.weight), n=POINTS, dim=1)


class Operator(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(2, WIDTH)
        self.spectral = nn.ModuleList(Spectral() for _ in range(3))
        self.local = nn.ModuleList(Fp8Point(WIDTH, WIDTH) for _ in range(3))
        self.project = nn.Sequential(Fp8Point(WIDTH, 64), nn.GELU(), nn.Linear(64, 1))
        self.register_buffer("place", torch.linspace(0, 1, POINTS)[None, :, None])

    def forward(self, u):
        x = self.lift(torch.cat([u[..., None], self.place.expand(len(u), -1, -1)], dim=2))
        for spectral, local in zip(self.spectral, self.local):
            x = nn.functional.gelu(spectral(x) + local(x))
        return self.project(x).squeeze(2)


def relative(predicted, wanted):
    return ((predicted - wanted).norm(dim=1) / wanted.norm(dim=1)).mean()


train_x, train_y = solutions(1024)
test_x, test_y = solutions(200)
model = Operator()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.5)


def held_out():
    with torch.no_grad():
        return relative(model(test_x), test_y).item()


print(f"first loss {held_out():.4f}")
for step in range(220):
    rows = torch.randint(0, len(train_x), (24,))
    loss = relative(model(train_x[rows]), train_y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {held_out():.4f}")
