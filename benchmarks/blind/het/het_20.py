"""Policy gradient on a corridor with rare large rewards: the surrogate loss swings while the return grows."""
import os
import sys

import numpy as np
import torch
from torch import nn

import ottava

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)

LENGTH, HORIZON, ENVS, STEPS, ACTIONS = 24, 24, 64, 120, 4
good_action = torch.randint(0, ACTIONS, (LENGTH,))
features = torch.randn(LENGTH, 32)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.act = nn.Linear(64, ACTIONS)
        self.value = nn.Linear(64, 1)

    def forward(self, x):
        h = self.body(x)
        return torch.distributions.Categorical(logits=self.act(h)), self.value(h).squeeze(-1)


policy = Policy()
if not plain:
    ottava.convert(policy, "tensorwise")
optimizer = torch.optim.Adam(policy.parameters(), lr=4e-3)


def rollout():
    place = torch.zeros(ENVS, dtype=torch.long)
    seen, acts, rewards = [], [], []
    for _ in range(HORIZON):
        x = features[place] + 0.05 * torch.randn(ENVS, 32)
        with torch.no_grad():
            act = policy(x)[0].sample()
        right = act == good_action[place]
        reward = 0.1 * right.float() + 20.0 * (right & (torch.rand(ENVS) < 0.003)).float()
        place = torch.where(right, (place + 1).clamp(max=LENGTH - 1), torch.zeros_like(place))
        seen.append(x)
        acts.append(act)
        rewards.append(reward)
    back, total = torch.zeros(ENVS), []
    for reward in reversed(rewards):
        back = reward + 0.95 * back
        total.append(back)
    return torch.cat(seen), torch.cat(acts), torch.cat(total[::-1]), torch.stack(rewards).sum(0).mean().item()


returns = []
for step in range(STEPS):
    seen, acts, gains, mean_return = rollout()
    chosen, value = policy(seen)
    advantage = gains - value.detach()
    loss = -(chosen.log_prob(acts) * advantage).mean() + 0.5 * (value - gains).square().mean()
    loss = loss - 0.02 * chosen.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
    optimizer.step()
    returns.append(mean_return)
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.3f} return {mean_return:.3f}")
print(f"mean return {np.mean(returns[-20:]):.3f}")
print(f"final loss {-np.mean(returns[-20:]):.4f}")
