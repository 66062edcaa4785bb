"""Policy gradient with a running baseline in a contextual bandit with noisy rewards."""

import torch
from torch import nn

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 5))
best = torch.randn(8, 5)
optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
baseline = 0.0
for step in range(300):
    x = torch.randn(64, 8)
    choice = torch.distributions.Categorical(logits=policy(x))
    action = choice.sample()
    reward = (x @ best).gather(1, action[:, None]).squeeze(1) + 2 * torch.randn(64)
    loss = -(choice.log_prob(action) * (reward - baseline)).mean() - 0.01 * choice.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    baseline = 0.95 * baseline + 0.05 * reward.mean().item()
    print(step, round(loss.item(), 4))
