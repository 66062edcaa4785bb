"""REINFORCE with a running baseline on a contextual bandit; the surrogate loss swings around zero."""
import os
import sys

import torch
from torch import nn

SEED = int(os.environ.get("SEED", "0"))
torch.manual_seed(SEED)
policy = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 6))
best = torch.randn(16, 6)
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
baseline, rewards = 0.0, []
loss = torch.zeros(())
for step in range(100):
    x = torch.randn(64, 16)
    choice = torch.distributions.Categorical(logits=policy(x))
    action = choice.sample()
    reward = ((x @ best).gather(1, action[:, None]).squeeze(1) > 1.0).float() + 0.2 * torch.randn(64)
    advantage = reward - baseline
    loss = -(choice.log_prob(action) * advantage).mean() - 0.01 * choice.entropy().mean()
    baseline = 0.9 * baseline + 0.1 * reward.mean().item()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
    optimizer.step()
    rewards.append(reward.mean().item())
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f} reward {reward.mean().item():.3f}")
print(f"reward of the last ten steps {sum(rewards[-10:]) / 10:.4f}")
print(f"final loss {loss.item():.4f}")
