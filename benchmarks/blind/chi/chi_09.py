"""Actor-critic on a pole that must be kept upright (written out in torch, 16 poles at once)."""
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

SEED = int(os.environ.get("SEED", 0))
POLES, HORIZON, GAMMA = 16, 20, 0.98


def advance(state, push):
    """One step of the cart: position, speed, angle, angular speed."""
    x, v, a, w = state.unbind(-1)
    force = torch.where(push == 1, 10.0, -10.0)
    temp = (force + 0.05 * w.square() * a.sin()) / 1.1
    acc = (9.8 * a.sin() - a.cos() * temp) / (0.5 * (4 / 3 - 0.1 * a.cos().square() / 1.1))
    state = torch.stack([x + 0.02 * v, v + 0.02 * (temp - 0.05 * acc * a.cos() / 1.1), a + 0.02 * w, w + 0.02 * acc], -1)
    return state, (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 0.21)


class Agent(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, d), nn.Tanh(), nn.Linear(d, d), nn.Tanh(), nn.Linear(d, 2))
        self.critic = nn.Sequential(nn.Linear(4, d), nn.Tanh(), nn.Linear(d, d), nn.Tanh(), nn.Linear(d, 1))


torch.manual_seed(SEED)
g = torch.Generator().manual_seed(330 + SEED)
agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
fresh = lambda n: 0.1 * torch.rand(n, 4, generator=g) - 0.05
state, age, lives, losses = fresh(POLES), torch.zeros(POLES), [], []
for update in range(200):
    logp, entropy, values, rewards, ends = [], [], [], [], []
    for _ in range(HORIZON):
        logits = agent.actor(state).log_softmax(-1)
        push = torch.multinomial(logits.exp().detach(), 1, generator=g)[:, 0]
        values.append(agent.critic(state)[:, 0])
        logp.append(logits.gather(1, push[:, None])[:, 0])
        entropy.append(-(logits.exp() * logits).sum(-1))
        state, fallen = advance(state, push)
        age += 1
        lives += age[fallen].tolist()
        age[fallen] = 0
        state = torch.where(fallen[:, None], fresh(POLES), state)
        rewards.append(1.0 - fallen.float())
        ends.append(fallen.float())
    with torch.no_grad():
        ahead, returns = agent.critic(state)[:, 0], []
        for r, e in zip(reversed(rewards), reversed(ends)):
            ahead = r + GAMMA * ahead * (1 - e)
            returns.insert(0, ahead)
    returns, values = torch.stack(returns), torch.stack(values)
    advantage = (returns - values).detach()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    policy = -(torch.stack(logp) * advantage).mean()
    loss = policy + 0.5 * F.smooth_l1_loss(values, returns) - 0.01 * torch.stack(entropy).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
    optimizer.step()
    losses.append(loss.item())
    if update % 25 == 24:
        print(f"update {update + 1}  loss {loss.item():.3f}  mean life {sum(lives[-30:]) / max(1, len(lives[-30:])):.0f}")
print("final loss", round(sum(losses[-25:]) / 25, 4))
