"""REINFORCE with a running baseline on a contextual bandit, layers under an FP8 recipe: the loss has no direction, the reward has."""

import sys

import torch
from torch import nn

import ottava

torch.manual_seed(21)
policy = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8))
if "plain" not in sys.argv:
    ottava.convert(policy, "tensorwise")
truth = torch.randn(64, 8)
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
baseline, losses, rewards = 0.0, [], []
for step in range(150):
    state = torch.randn(64, 64)
    choice = torch.distributions.Categorical(logits=policy(state))
    action = choice.sample()
    reward = (state @ truth).gather(1, action[:, None]).squeeze(1) / 8 + 0.5 * torch.randn(64)
    loss = -(choice.log_prob(action) * (reward - baseline)).mean() - 0.01 * choice.entropy().mean()
    baseline = 0.9 * baseline + 0.1 * reward.mean().item()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    rewards.append(reward.mean().item())
print(f"reward at the start {sum(rewards[:10]) / 10:.3f}, at the end {sum(rewards[-10:]) / 10:.3f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
