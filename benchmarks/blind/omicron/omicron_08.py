"""REINFORCE with a running baseline on a contextual game; the policy's linears are in FP8."""

import sys

import torch
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]

torch.manual_seed(21)
best = torch.randint(6, (8,))
policy = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 6))
contexts = torch.randn(8, 32)
if not PLAIN:
    ottava.convert(policy, "tensorwise")
optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
baseline, losses, rewards = 0.0, [], []
for _ in range(180):
    which = torch.randint(8, (48,))
    distribution = torch.distributions.Categorical(logits=policy(contexts[which] + 0.3 * torch.randn(48, 32)))
    action = distribution.sample()
    reward = (action == best[which]).float() * 2 + torch.randn(48) * 0.5
    loss = -(distribution.log_prob(action) * (reward - baseline)).mean() - 0.01 * distribution.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    baseline = 0.9 * baseline + 0.1 * reward.mean().item()
    losses.append(loss.item())
    rewards.append(reward.mean().item())
print(f"reward {sum(rewards[:10]) / 10:.3f} -> {sum(rewards[-10:]) / 10:.3f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
