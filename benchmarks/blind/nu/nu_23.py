"""REINFORCE with a moving baseline on a contextual bandit; the loss is noisy and says little, the reward says more."""

import sys

import torch
from torch import nn

import ottava

PLAIN = "plain" in sys.argv[2:]

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 16))
if not PLAIN:
    ottava.convert(policy, "delayed", filter=lambda name, layer: name != "4")
optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
best = torch.randn(32, 16)
baseline, rewards, losses = 0.0, [], []
for _step in range(200):
    x = torch.randn(64, 32)
    choice = torch.distributions.Categorical(logits=policy(x))
    action = choice.sample()
    reward = (x @ best).gather(1, action[:, None]).squeeze(1) / 5 + torch.randn(64)
    loss = -(choice.log_prob(action) * (reward - baseline)).mean() - 0.01 * choice.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    baseline = 0.9 * baseline + 0.1 * reward.mean().item()
    rewards.append(reward.mean().item())
    losses.append(loss.item())
print(f"reward {sum(rewards[-20:]) / 20:.4f}  loss {sum(losses[-20:]) / 20:.4f}")
