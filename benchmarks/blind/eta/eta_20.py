"""A policy for a bandit with contexts, learnt from sampled rewards, delayed scaling."""

import sys

import torch
from torch import nn

import ottava

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(27)
ARMS = 10
truth = nn.Linear(32, ARMS)
model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, ARMS))
if not plain:
    print(ottava.convert(model, "delayed"))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
base, regrets = 0.0, []
for step in range(200):
    context = 2 * torch.randn(128, 32)
    with torch.no_grad():
        worth = truth(context)
    policy = torch.distributions.Categorical(logits=model(context).float())
    arm = policy.sample()
    reward = worth.gather(1, arm[:, None])[:, 0] + 0.3 * torch.randn(128)
    base = 0.9 * base + 0.1 * reward.mean().item()
    loss = -(policy.log_prob(arm) * (reward - base)).mean() - 0.01 * policy.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    regrets.append((worth.max(1).values - worth.gather(1, arm[:, None])[:, 0]).mean().item())
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f} regret {regrets[-1]:.4f}")
print(f"loss {sum(regrets[-20:]) / 20:.4f}")
