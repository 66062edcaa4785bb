"""REINFORCE on a corridor: the loss means little, the return goes up."""
import sys

import torch
from torch import nn
from torch.distributions import Categorical

import ottava

PLAIN = "plain" in sys.argv
torch.manual_seed(104)
policy = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
if not PLAIN:
    print(ottava.convert(policy, "tensorwise"))
optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
returns, losses = [], []
for episode in range(120):
    place, goal = torch.randint(0, 16, (2, 32))
    chosen, rewards = [], []
    for _ in range(10):
        seen = torch.cat([torch.eye(16)[place], torch.eye(16)[goal]], 1)
        choice = Categorical(logits=policy(seen))
        action = choice.sample()
        chosen.append(choice.log_prob(action))
        place = (place + 2 * action - 1).clamp(0, 15)
        rewards.append(-(place - goal).abs().float() / 5)
    gains = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    advantage = (gains - gains.mean(1, keepdim=True)) / (gains.std(1, keepdim=True) + 1e-6)
    loss = -(torch.stack(chosen) * advantage).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    returns.append(torch.stack(rewards).sum(0).mean().item())
print(f"return {sum(returns[:10]) / 10:.3f} -> {sum(returns[-10:]) / 10:.3f}")
print(f"loss {sum(losses[-20:]) / 20:.4f}")
