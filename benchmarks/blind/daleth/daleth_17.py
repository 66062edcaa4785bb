"""Score matching by Hyvarinen: the loss is half of the squared score plus its divergence, so it falls far below zero."""
import os

import torch
from torch import nn

SEED = int(os.environ.get("SEED", "0"))
torch.manual_seed(SEED)
CENTRES = torch.tensor([[-1.0, 0.0], [1.0, 0.6], [0.3, -1.2]])
SPREAD = 0.4


def points(count):
    return CENTRES[torch.randint(3, (count,))] + SPREAD * torch.randn(count, 2)


def true_score(x):
    away = CENTRES - x[:, None]
    share = (-away.square().sum(-1) / (2 * SPREAD**2)).softmax(1)
    return (share[..., None] * away).sum(1) / SPREAD**2


def e4m3(x):
    """Rounds to FP8 with one scale; the gradient passes as if nothing was rounded, twice if need be."""
    with torch.no_grad():
        scale = 448.0 / x.abs().amax().clamp(min=1e-12)
        rounded = (x * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).to(x.dtype) / scale
    return x + (rounded - x).detach()


class Rounded(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(e4m3(x), e4m3(self.weight), self.bias)


net = nn.Sequential(
    nn.Linear(2, 96), nn.Softplus(), Rounded(96, 96), nn.Softplus(), Rounded(96, 96), nn.Softplus(), nn.Linear(96, 2)
)
optimizer = torch.optim.Adam(net.parameters(), 3e-3, betas=(0.9, 0.99))
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)


def objective(x):
    x = x.requires_grad_()
    score = net(x)
    divergence = 0.0
    for i in range(2):
        (slope,) = torch.autograd.grad(score[:, i].sum(), x, create_graph=True)
        divergence = divergence + slope[:, i]
    return (score.square().sum(1) / 2 + divergence).mean()


held = points(2000)


@torch.no_grad()
def miss():
    """What one wants: the mean squared distance to the true score."""
    return (net(held) - true_score(held)).square().sum(1).mean().item()


print("first loss %.4f" % miss())
for step in range(300):
    loss = objective(points(256))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 10.0)
    optimizer.step()
    schedule.step()
    if step % 50 == 0:
        print(f"step {step}: objective {loss.item():.3f}, miss {miss():.3f}")
print("final loss %.4f" % miss())
