"""Q-learning from a replay of a grid world; the number at the end is the greedy policy's negative return."""
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import ottava

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)
rng = np.random.default_rng(seed)

SIDE, GAMMA, STEPS, BATCH = 6, 0.9, 200, 256
MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])
goal = torch.tensor([SIDE - 1, SIDE - 1])
pits = {(1, 1), (2, 4), (4, 2), (3, 3), (5, 1)}
pit_map = torch.zeros(SIDE, SIDE, dtype=torch.bool)
for a, b in pits:
    pit_map[a, b] = True


def act_in(place, action):
    after = (place + MOVES[action]).clamp(0, SIDE - 1)
    done = (after == goal).all(-1)
    fell = pit_map[after[:, 0], after[:, 1]]
    reward = done.float() - fell.float() - 0.02
    return after, reward, done | fell


def look(place):
    return torch.cat([F.one_hot(place[:, 0], SIDE), F.one_hot(place[:, 1], SIDE)], -1).float() @ basis


basis = torch.randn(2 * SIDE, 48) / 2
place = torch.randint(0, SIDE, (8000, 2))
action = torch.randint(0, 4, (8000,))
after, reward, done = act_in(place, action)


def make():
    return nn.Sequential(nn.Linear(48, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))


online, target = make(), make()
target.load_state_dict(online.state_dict())
if not plain:
    ottava.convert(online, "tensorwise")
    ottava.convert(target, "tensorwise")
optimizer = torch.optim.Adam(online.parameters(), lr=2e-3)
for step in range(STEPS):
    rows = torch.randint(0, len(place), (BATCH,))
    q = online(look(place[rows])).gather(1, action[rows, None])
    with torch.no_grad():
        best = target(look(after[rows])).max(1).values
        goal_q = reward[rows] + GAMMA * best * (~done[rows]).float()
    if mode == "good":
        goal_q = goal_q[:, None]
    error = q - goal_q
    loss = torch.where(error.abs() < 1, 0.5 * error.square(), error.abs() - 0.5).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for new, old in zip(online.parameters(), target.parameters()):
            old.lerp_(new, 0.1)
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")

returns = torch.zeros(64)
alive = torch.ones(64)
spot = torch.randint(0, SIDE - 1, (64, 2))
with torch.no_grad():
    for _ in range(20):
        spot, reward, done = act_in(spot, online(look(spot)).argmax(1))
        returns += alive * reward
        alive *= (~done).float()
print(f"mean return {returns.mean().item():.3f}")
print(f"final loss {-returns.mean().item():.4f}")
