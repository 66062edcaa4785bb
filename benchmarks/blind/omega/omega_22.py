"""Actor-critic on a windy walk with a rare prize; the networks under torchao's float8."""

import dataclasses
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

plain = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
torch.set_num_threads(1)

STEPS, WALKERS, HORIZON, GAMMA = 120, 32, 24, 0.97


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.mid = nn.Linear(16, 64), nn.Linear(64, 64)
        self.policy, self.value = nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, x):
        h = torch.tanh(self.inp(x))
        h = torch.tanh(self.mid(h))
        return torch.distributions.Categorical(logits=self.policy(h)), self.value(h)[..., 0]


def seen(at, goal):
    z = torch.cat([at, goal, at - goal, (at - goal).sign()], -1)
    return torch.cat([z, z**2], -1)


moves = torch.tensor([[0.0, 1.0], [0.0, -1.0], [1.0, 0.0], [-1.0, 0.0]]) * 0.25


def walk(model):
    """Rewards: nearer to the goal; sometimes a prize of 5 on reaching it; gusts that nobody can foresee."""
    at, goal = torch.randn(WALKERS, 2), torch.randn(WALKERS, 2)
    logs, values, rewards, entropies = [], [], [], []
    for _ in range(HORIZON):
        chance, value = model(seen(at, goal))
        action = chance.sample()
        gust = 0.6 * torch.randn(WALKERS, 2) * (torch.rand(WALKERS, 1) < 0.08)
        new = at + moves[action] + gust
        reward = (at - goal).norm(dim=-1) - (new - goal).norm(dim=-1)
        there = (new - goal).norm(dim=-1) < 0.25
        reward = reward + 5.0 * (there & (torch.rand(WALKERS) < 0.1))
        at = torch.where(there[:, None], torch.randn(WALKERS, 2), new)
        logs.append(chance.log_prob(action))
        values.append(value)
        rewards.append(reward)
        entropies.append(chance.entropy())
    return (torch.stack(x) for x in (logs, values, rewards, entropies))


model = ActorCritic()
if not plain:
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name in ("inp", "mid"))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
returns = []
for step in range(STEPS):
    logs, values, rewards, entropies = walk(model)
    total, ahead = torch.zeros(WALKERS), []
    for reward in rewards.flip(0):
        total = reward + GAMMA * total
        ahead.insert(0, total)
    ahead = torch.stack(ahead)
    gain = ahead - values.detach()
    gain = (gain - gain.mean()) / (gain.std() + 1e-6)
    loss = -(gain * logs).mean() + 0.25 * F.mse_loss(values, ahead) - 0.01 * entropies.mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    returns.append(rewards.sum(0).mean().item())
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f} return {returns[-1]:.2f}")
print(f"return at first {sum(returns[:10]) / 10:.2f}, at last {sum(returns[-10:]) / 10:.2f}")
print(f"final loss {-sum(returns[-10:]) / 10:.4f}")
