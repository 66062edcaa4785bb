"""PPO on a small gridworld-like bandit: clipped surrogate, value loss and entropy bonus."""
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

PLAIN, SEED = "plain" in sys.argv, int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
body, policy, value = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 6), nn.Linear(64, 1)
params = [*body.parameters(), *policy.parameters(), *value.parameters()]
optimizer = torch.optim.Adam(params, lr=3e-3, eps=1e-5)
best = torch.randn(16, 6, generator=torch.Generator().manual_seed(2))
step, losses, rewards = 0, [], []
for rollout in range(20):
    with torch.no_grad():
        states = torch.randn(256, 16)
        h = body(states)
        dist = torch.distributions.Categorical(logits=policy(h))
        actions = dist.sample()
        old = dist.log_prob(actions)
        reward = (states @ best).gather(1, actions[:, None]).squeeze(1) + 2 * torch.randn(256)
        advantage = reward - value(h).squeeze(1)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    rewards.append(reward.mean().item())
    for chunk in torch.randperm(256).chunk(4):
        h = body(states[chunk])
        dist = torch.distributions.Categorical(logits=policy(h))
        ratio = (dist.log_prob(actions[chunk]) - old[chunk]).exp()
        surrogate = torch.min(ratio * advantage[chunk], ratio.clamp(0.8, 1.2) * advantage[chunk]).mean()
        loss = -surrogate + 0.05 * F.mse_loss(value(h).squeeze(1), reward[chunk]) - 0.01 * dist.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
        losses.append(loss.item())
        step += 1
    if rollout % 4 == 0:
        print(f"step {step} reward {rewards[-1]:.3f} loss {loss.item():.4f}")
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
