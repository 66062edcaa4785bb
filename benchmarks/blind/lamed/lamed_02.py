"""A small GAN on a ring of Gaussians. The generator's loss is printed; no FP8."""
import os
import sys

import torch
from torch import nn

SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH = 200, 128


def real(count):
    angle = torch.randint(0, 6, (count,)) * 6.2832 / 6
    return 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.15 * torch.randn(count, 2)


def mlp(n_in, n_out):
    return nn.Sequential(
        nn.Linear(n_in, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, n_out)
    )


torch.manual_seed(SEED)
maker, judge = mlp(8, 2), mlp(2, 1)
maker_optimizer = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.9))
judge_optimizer = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.5, 0.9))
bce = nn.functional.binary_cross_entropy_with_logits
losses = []
for step in range(STEPS):
    for _ in range(2):
        fake = maker(torch.randn(BATCH, 8)).detach()
        yes, no = judge(real(BATCH)), judge(fake)
        judging = bce(yes, torch.full_like(yes, 0.9)) + bce(no, torch.zeros_like(no))
        judge_optimizer.zero_grad()
        judging.backward()
        judge_optimizer.step()
    verdict = judge(maker(torch.randn(BATCH, 8)))
    loss = bce(verdict, torch.ones_like(verdict))
    maker_optimizer.zero_grad()
    loss.backward()
    maker_optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} maker {loss.item():.4f} judge {judging.item():.4f}")
with torch.no_grad():
    made = maker(torch.randn(2000, 8))
    print(f"mean radius of what it makes {made.norm(dim=1).mean():.3f}, of the ring 2.0")
print(f"final loss {sum(losses[-15:]) / 15:.4f}")
