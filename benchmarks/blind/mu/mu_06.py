"""REINFORCE with a running baseline on a small corridor."""

import sys

import torch
from torch import nn

import ottava

PLAIN = "plain" in sys.argv
SIZE, HORIZON, EPISODES = 12, 16, 24

torch.manual_seed(8)
policy = nn.Sequential(nn.Linear(SIZE, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
if not PLAIN:
    ottava.convert(policy, "tensorwise", filter=lambda name, layer: name == "2")
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
baseline = 0.0
losses = []
for step in range(120):
    place = torch.randint(0, SIZE - 1, (EPISODES,))
    chosen, rewards, alive = [], [], torch.ones(EPISODES)
    for _ in range(HORIZON):
        pick = torch.distributions.Categorical(logits=policy(nn.functional.one_hot(place, SIZE).float()))
        action = pick.sample()
        slip = torch.rand(EPISODES) < 0.15
        move = torch.where(slip, torch.randint(-1, 2, (EPISODES,)), action - 1)
        place = (place + move).clamp(0, SIZE - 1)
        reached = (place == SIZE - 1).float()
        rewards.append(alive * (reached * 5 - 0.1))
        chosen.append(pick.log_prob(action) * alive)
        alive = alive * (1 - reached)
    reward = torch.stack(rewards)
    to_go = reward.flip(0).cumsum(0).flip(0)
    advantage = to_go - baseline
    baseline = 0.9 * baseline + 0.1 * float(to_go.mean())
    loss = -(torch.stack(chosen) * advantage).sum(0).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, round(loss.item(), 4), "return", round(float(reward.sum(0).mean()), 3))
print(f"loss {sum(losses[-10:]) / 10:.4f}")
