"""A GFlowNet on a grid with the loss of trajectory balance; rewards are counts in the thousands.

The logarithm of the partition function is a parameter of its own with a rate a hundred times that of the policy.

python zayin_23.py good|bad
"""

import os

import torch
from torch import nn

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
SIDE = 8
axis = torch.linspace(-1, 1, SIDE).abs()
outer, ring = (axis > 0.5).float(), ((axis > 0.6) & (axis < 0.9)).float()
REWARD = 1000 * (0.05 + 0.5 * torch.outer(outer, outer) + 2 * torch.outer(ring, ring))
GOAL = REWARD / REWARD.sum()

policy = nn.Sequential(nn.Linear(2 * SIDE, 128), nn.LeakyReLU(), nn.Linear(128, 128), nn.LeakyReLU(), nn.Linear(128, 3))
log_z = nn.Parameter(torch.zeros(()))
optimizer = torch.optim.Adam(
    [{"params": policy.parameters(), "lr": 2e-3}, {"params": [log_z], "lr": 0.2}]
)
schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [200, 260], gamma=0.3)


def log_probabilities(state):
    code = torch.cat([nn.functional.one_hot(state[:, i], SIDE) for i in (0, 1)], dim=1).float()
    logits = policy(code)
    at_edge = torch.cat([state == SIDE - 1, torch.zeros(len(state), 1, dtype=torch.bool)], dim=1)
    return logits.masked_fill(at_edge, -1e9).log_softmax(dim=1)


def terminal_distribution():
    """Exact, by going through all states once."""
    with torch.no_grad():
        cells = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE))
        chances = log_probabilities(cells).exp().view(SIDE, SIDE, 3)
        reach = torch.zeros(SIDE, SIDE)
        reach[0, 0] = 1
        for i in range(SIDE):
            for j in range(SIDE):
                if i:
                    reach[i, j] += reach[i - 1, j] * chances[i - 1, j, 0]
                if j:
                    reach[i, j] += reach[i, j - 1] * chances[i, j - 1, 1]
        return reach * chances[:, :, 2]


def held_out():
    return (terminal_distribution() - GOAL).abs().sum().item()


def trajectories(count, explore):
    state = torch.zeros(count, 2, dtype=torch.long)
    forward, backward = torch.zeros(count), torch.zeros(count)
    going = torch.ones(count, dtype=torch.bool)
    for _ in range(2 * SIDE - 1):
        log_p = log_probabilities(state)
        chances = log_p.detach().exp()
        allowed = (chances > 0).float()
        chances = (1 - explore) * chances + explore * allowed / allowed.sum(dim=1, keepdim=True)
        action = torch.multinomial(chances, 1).squeeze(1)
        forward = forward + torch.where(going, log_p.gather(1, action[:, None]).squeeze(1), 0.0)
        moved = going & (action < 2)
        state = state.clone()
        state[moved, action[moved]] += 1
        parents = (state > 0).sum(dim=1).clamp_min(1).float()
        backward = backward - torch.where(moved, parents.log(), 0.0)
        going = moved
        if not going.any():
            break
    return state, forward, backward


print(f"first loss {held_out():.4f}")
for step in range(300):
    state, forward, backward = trajectories(64, explore=0.1)
    reward = REWARD[state[:, 0], state[:, 1]]
    loss = (log_z + forward - backward - reward.log()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 30 == 0:
        print(f"step {step} loss {loss.item():.4f} log Z {log_z.item():.3f} of {REWARD.sum().log().item():.3f}")
print(f"final loss {held_out():.4f}")
