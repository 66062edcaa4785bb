"""Actor and critic on a contextual bandit: the policy's loss crosses zero and says little, the reward rises."""
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
best = nn.Linear(16, 6).requires_grad_(False)
best.weight.mul_(4)
body = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
actor, critic = nn.Linear(64, 6), nn.Linear(64, 1)
optimizer = torch.optim.Adam([*body.parameters(), *actor.parameters(), *critic.parameters()], lr=4e-3)
losses, rewards = [], []
for step in range(100):
    x = torch.randn(64, 16)
    h = body(x)
    policy = torch.distributions.Categorical(logits=actor(h))
    action = policy.sample()
    reward = (best(x).argmax(1) == action).float() + 0.3 * torch.randn(64)
    value = critic(h).squeeze(1)
    advantage = (reward - value).detach()
    loss = -(policy.log_prob(action) * advantage).mean() + 0.5 * F.mse_loss(value, reward) - 0.01 * policy.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    rewards.append(reward.mean().item())
print(f"reward {sum(rewards[-10:]) / 10:.3f}")
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
