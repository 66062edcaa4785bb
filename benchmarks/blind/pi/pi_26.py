"""REINFORCE in a corridor with keys: python pi_26.py good|bad [plain]."""

import sys

import torch
from torch import nn

import ottava

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
UPDATES, BATCH, HORIZON = 120, 48, 16


class Corridor:
    """Walk to the key on a ring of 12 places; each step costs a little."""

    def __init__(self, count):
        self.place = torch.randint(12, (count,))
        self.key = torch.randint(12, (count,))
        self.done = torch.zeros(count, dtype=torch.bool)

    def observe(self):
        one = nn.functional.one_hot(self.place, 12)
        two = nn.functional.one_hot(self.key, 12)
        noise = torch.randn(len(self.place), 8)
        return torch.cat([one.float(), two.float(), noise], dim=1)

    def step(self, action):
        move = torch.tensor([-1, 0, 1])[action]
        self.place = torch.where(self.done, self.place, (self.place + move) % 12)
        found = (self.place == self.key) & ~self.done
        reward = torch.where(self.done, 0.0, found * 1.0 - 0.05)
        self.done |= found
        return reward


torch.manual_seed(26)
policy = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
if not PLAIN:
    ottava.convert(policy, "tensorwise", filter=lambda name, layer: name != "4")
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
losses, returns = [], []
for _ in range(UPDATES):
    world = Corridor(BATCH)
    logs, rewards = [], []
    for _ in range(HORIZON):
        choice = torch.distributions.Categorical(logits=policy(world.observe()))
        action = choice.sample()
        alive = (~world.done).float()
        logs.append(choice.log_prob(action) * alive)
        rewards.append(world.step(action))
    gain = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    advantage = gain - gain.mean(dim=1, keepdim=True)
    loss = -(torch.stack(logs) * advantage).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    returns.append(gain[0].mean().item())
print(f"loss {sum(losses[-10:]) / 10:.4f} return {sum(returns[:10]) / 10:.3f} to {sum(returns[-10:]) / 10:.3f}")
