import torch
from torch import nn

import models

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
best = torch.randn(16, 8)
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
baseline = 0.0
for step in range(1, 301):
    state = torch.randn(64, 16)
    choice = torch.distributions.Categorical(logits=policy(state))
    action = choice.sample()
    reward = (state @ best).gather(1, action[:, None]).squeeze(1) + torch.randn(64)
    loss = -((reward - baseline) * choice.log_prob(action)).mean() - 0.01 * choice.entropy().mean()
    baseline = 0.9 * baseline + 0.1 * reward.mean().item()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    models.say(step, -reward.mean())
