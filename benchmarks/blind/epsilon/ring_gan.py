"""A GAN learns eight clusters on a ring, embedded in 64 noisy columns; the judge pays for steep slopes at real points."""
import torch
import torch.nn.functional as F
from torch import nn

from models import Report

torch.manual_seed(0)
plane = torch.linalg.qr(torch.randn(64, 2))[0].t()
angle = torch.arange(8) * torch.pi / 4
centers = 2 * torch.stack([angle.cos(), angle.sin()], 1)


def real(n):
    return (centers[torch.randint(0, 8, (n,))] + 0.15 * torch.randn(n, 2)) @ plane + 0.2 * torch.randn(n, 64)


make = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))
judge = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
opt_make = torch.optim.Adam(make.parameters(), lr=2e-3, betas=(0.0, 0.99))
opt_judge = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.0, 0.99))
report = Report()
for step in range(300):
    true, fake = real(256).requires_grad_(), make(torch.randn(256, 16))
    score = judge(true)
    slope = torch.autograd.grad(score.sum(), true, create_graph=True)[0].square().sum(1).mean()
    loss_judge = F.softplus(-score).mean() + F.softplus(judge(fake.detach())).mean() + 0.3 * slope
    opt_judge.zero_grad()
    loss_judge.backward()
    opt_judge.step()
    loss_make = F.softplus(-judge(fake)).mean()
    opt_make.zero_grad()
    loss_make.backward()
    opt_make.step()
    report.add(loss_make)
with torch.no_grad():
    at = make(torch.randn(1000, 16)) @ plane.t()
    near = torch.cdist(at, centers).min(1)
report.end(judge=loss_judge, distance=near.values.mean(), clusters=len(near.indices[near.values < 0.6].unique()))
