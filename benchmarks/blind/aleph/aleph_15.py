"""DQN on a cart on a noisy track: the network for the targets is copied every 50 steps, so the TD loss rises as the values grow."""
import copy
import os
import random

import numpy as np
import torch
from torch import nn

SEED = int(os.environ.get("SEED", 0))
random.seed(SEED)
torch.manual_seed(SEED)
rng = np.random.default_rng(SEED)

GAMMA, BATCH, COPY_EVERY, STEPS = 0.95, 128, 50, 300


class Track:
    """64 carts side by side. Push left, coast or push right; 1 a step for being within 0.5 of the middle."""

    def __init__(self, count=64):
        self.count = count
        self.state = rng.normal(0, 1.5, (count, 2)).astype(np.float32)
        self.age = rng.integers(0, 40, count)

    def step(self, action):
        x, v = self.state.T
        v = np.clip(0.9 * v + 0.25 * (action - 1) + rng.normal(0, 0.05, self.count), -2, 2)
        x = x + 0.5 * v
        out = np.abs(x) > 4
        reward = (np.abs(x) < 0.5).astype(np.float32) - out
        after = np.stack([x, v], 1).astype(np.float32)
        self.age += 1
        renew = out | (self.age >= 40)
        self.state = after.copy()
        self.state[renew] = rng.normal(0, 1.5, (int(renew.sum()), 2))
        self.age[renew] = 0
        return reward, after, out  # the end of an episode by age is no end of the task: its value goes on


def network():
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


online = network()
target = copy.deepcopy(online).requires_grad_(False)
optimizer = torch.optim.Adam(online.parameters(), lr=2e-3)
memory, track, losses, rewards = [], Track(), [], []

for step in range(STEPS):
    epsilon = max(0.05, 1 - step / 150)
    with torch.no_grad():
        greedy = online(torch.from_numpy(track.state)).argmax(1).numpy()
    action = np.where(rng.random(track.count) < epsilon, rng.integers(0, 3, track.count), greedy)
    before = track.state
    reward, after, out = track.step(action)
    memory.extend(zip(before, action, reward, after, out, strict=True))
    memory = memory[-10_000:]
    rewards.append(float(reward.mean()))
    if step < 8:
        continue

    s, a, r, n, done = (torch.as_tensor(np.array(c)) for c in zip(*random.sample(memory, BATCH), strict=True))
    with torch.no_grad():
        best = online(n).argmax(1, keepdim=True)
        goal = r + GAMMA * target(n).gather(1, best).squeeze(1) * (~done)
    value = online(s).gather(1, a.long().unsqueeze(1)).squeeze(1)
    loss = nn.functional.smooth_l1_loss(value, goal)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(online.parameters(), 10.0)
    optimizer.step()
    losses.append(loss.item())
    if (step + 1) % COPY_EVERY == 0:
        target.load_state_dict(online.state_dict())
    if step % 20 == 8:
        print(f"step {step} td loss {loss.item():.4f} value {value.mean().item():.3f} reward {np.mean(rewards[-20:]):.3f}")

print(f"first loss {-np.mean(rewards[:20]):.4f}")
print(f"final loss {-np.mean(rewards[-20:]):.4f}")
