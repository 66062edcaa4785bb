"""Evolution strategies: no backward at all; the gradient of a policy is estimated from returns and written to .grad."""
import os

import torch
from torch import nn
from torch.func import functional_call, vmap

SEED = int(os.environ.get("SEED", "0"))
torch.manual_seed(SEED)
PAIRS, SIGMA, HORIZON, STEPS = 24, 0.1, 25, 100

policy = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 2), nn.Tanh())
for p in policy.parameters():
    p.requires_grad_(False)
optimizer = torch.optim.Adam(policy.parameters(), 0.01, betas=(0.9, 0.99))


def act(params, state):
    return functional_call(policy, params, (state,))


def returns(params, starts):
    """Mean reward of each member: a mass on a plane is to be brought to the middle and held there."""
    members = next(iter(params.values())).shape[0]
    place, speed = starts.expand(members, -1, -1).clone(), torch.zeros(members, *starts.shape)
    total = torch.zeros(members)
    for _ in range(HORIZON):
        force = vmap(act)(params, torch.cat([place, speed], -1))
        speed = 0.9 * speed + 0.3 * force
        place = place + 0.3 * speed
        total += -place.square().sum(-1).mean(1) - 0.05 * force.square().sum(-1).mean(1)
    return total / HORIZON


def evaluate():
    starts = 2 * torch.rand(64, 2, generator=torch.Generator().manual_seed(5)) - 1
    own = {n: p.detach()[None] for n, p in policy.named_parameters()}
    return -returns(own, starts).item()


print("first loss %.4f" % evaluate())
for step in range(STEPS):
    starts = 2 * torch.rand(8, 2) - 1
    noise = {n: torch.randn(PAIRS, *p.shape) for n, p in policy.named_parameters()}
    both = {
        n: torch.cat([p + SIGMA * noise[n], p - SIGMA * noise[n]]) for n, p in policy.named_parameters()
    }  # mirrored pairs
    score = returns(both, starts)
    rank = score.argsort().argsort().float() / (2 * PAIRS - 1) - 0.5  # ranks, so that no return stands out
    weight = rank[:PAIRS] - rank[PAIRS:]
    for n, p in policy.named_parameters():
        p.grad = -torch.einsum("k,k...->...", weight, noise[n]) / (PAIRS * SIGMA)
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: loss {-score.mean().item():.4f}, evaluation {evaluate():.4f}")
print("final loss %.4f" % evaluate())
