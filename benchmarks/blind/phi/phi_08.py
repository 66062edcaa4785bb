"""REINFORCE with a learned baseline on a small grid: the loss swings about zero, the return is what grows."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
SIZE, HORIZON, GAMES, STEPS = 6, 12, 64, 90
MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4 * SIZE, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.policy, self.value = nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, place, goal):
        x = F.one_hot(torch.cat([place, goal], -1), SIZE).float().flatten(1)
        h = self.trunk(x)
        return torch.distributions.Categorical(logits=self.policy(h)), self.value(h).squeeze(-1)


agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=4e-3)
returns, losses = [], []
for step in range(STEPS):
    place, goal = torch.randint(0, SIZE, (GAMES, 2)), torch.randint(0, SIZE, (GAMES, 2))
    logps, values, rewards, entropies = [], [], [], []
    for _ in range(HORIZON):
        pi, value = agent(place, goal)
        action = pi.sample()
        before = (place - goal).abs().sum(-1)
        place = (place + MOVES[action]).clamp(0, SIZE - 1)
        after = (place - goal).abs().sum(-1)
        rewards.append((before - after).float() + (after == 0).float())
        logps.append(pi.log_prob(action))
        values.append(value)
        entropies.append(pi.entropy())
    gain, gains = torch.zeros(GAMES), []
    for reward in reversed(rewards):
        gain = reward + 0.9 * gain
        gains.append(gain)
    gains, values = torch.stack(gains[::-1]), torch.stack(values)
    advantage = gains - values.detach()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    loss = -(advantage * torch.stack(logps)).mean() - 0.01 * torch.stack(entropies).mean()
    loss = loss + 0.1 * F.smooth_l1_loss(values, gains)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    returns.append(torch.stack(rewards).sum(0).mean().item())
    if step % 10 == 0:
        print(step, losses[-1], returns[-1])
print("return", sum(returns[-10:]) / 10)
print("final loss", sum(losses[-10:]) / 10)
