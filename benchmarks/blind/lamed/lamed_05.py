"""Advantage actor-critic on a windy corridor; the networks run under ottava's tensorwise recipe."""
import os
import sys

import torch
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, ENVS, HORIZON, GAMMA = 140, 32, 10, 0.95


class Corridor:
    """Walk to the light; the wind pushes. The light jumps when it is reached."""

    def __init__(self):
        self.at, self.light = torch.rand(ENVS, 2) * 2 - 1, torch.rand(ENVS, 2) * 2 - 1

    def see(self):
        return torch.cat([self.at, self.light, self.light - self.at], 1) @ eyes

    def move(self, action):
        way = torch.tensor([[0.2, 0], [-0.2, 0], [0, 0.2], [0, -0.2]])[action]
        self.at = (self.at + way + 0.05 * torch.randn(ENVS, 2)).clamp(-1.2, 1.2)
        there = (self.at - self.light).norm(dim=1) < 0.25
        self.light = torch.where(there[:, None], torch.rand(ENVS, 2) * 2 - 1, self.light)
        return there.float() * 2 - 0.05


torch.manual_seed(SEED)
eyes = torch.randn(6, 32) * 0.5
body = nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh())
policy, critic = nn.Linear(64, 4), nn.Linear(64, 1)
if not PLAIN:
    ottava.convert(body, "tensorwise")
parameters = [*body.parameters(), *policy.parameters(), *critic.parameters()]
optimizer = torch.optim.RMSprop(parameters, lr=2e-3)
world, rewards_seen, losses = Corridor(), [], []
for step in range(STEPS):
    logs, values, rewards, entropies = [], [], [], []
    for _ in range(HORIZON):
        hidden = body(world.see())
        choice = torch.distributions.Categorical(logits=policy(hidden))
        action = choice.sample()
        logs.append(choice.log_prob(action))
        values.append(critic(hidden).squeeze(-1))
        entropies.append(choice.entropy())
        rewards.append(world.move(action))
    with torch.no_grad():
        total = critic(body(world.see())).squeeze(-1)
    returns = []
    for reward in reversed(rewards):
        total = reward + GAMMA * total
        returns.insert(0, total)
    values, returns = torch.stack(values), torch.stack(returns)
    gain = (returns - values).detach()
    loss = -(torch.stack(logs) * gain).mean() + 0.5 * (values - returns).square().mean() - 0.01 * torch.stack(entropies).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    losses.append(loss.item())
    rewards_seen.append(torch.stack(rewards).mean().item())
    if step % 20 == 0:
        print(f"step {step} loss {losses[-1]:.4f} reward {rewards_seen[-1]:.4f}")
print(f"reward {sum(rewards_seen[-20:]) / 20:.4f}")
print(f"final loss {sum(losses[-15:]) / 15:.4f}")
