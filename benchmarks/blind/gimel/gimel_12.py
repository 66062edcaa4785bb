"""Learns the value of states of small games from a replay buffer; tested against returns of fresh games."""

import os
import sys

import torch
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
torch.manual_seed(int(os.environ.get("SEED", "0")))
STATES, STEPS, GAMMA, GAMES = 48, 200, 0.98, 600
features = torch.randn(STATES, 32)
moves = torch.softmax(1.5 * torch.randn(STATES, STATES), 1)
reward_of = torch.rand(STATES)
ends = torch.rand(STATES) < 0.25


def play():
    """One game: it ends in the first state that is an end; the next game begins anywhere."""
    at, seen = int(torch.randint(0, STATES, ())), []
    while True:
        after = int(torch.multinomial(moves[at], 1))
        seen.append((at, reward_of[at].item(), after, bool(ends[after])))
        if ends[after] or len(seen) == 60:
            return seen
        at = after


class Value(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


games = [play() for _ in range(GAMES)]
rows = [row for game in games for row in game]
state, reward, after, over = (torch.tensor(column) for column in zip(*rows))

value, target = Value(), Value()
target.load_state_dict(value.state_dict())
target.requires_grad_(False)
if not PLAIN:
    ottava.convert(value, "rowwise")
optimizer = torch.optim.Adam(value.parameters(), lr=1e-3)
for step in range(STEPS):
    i = torch.randint(0, len(state), (128,))
    with torch.no_grad():
        ahead = target(features[after[i]])
    if MODE == "good":
        ahead = ahead * (~over[i])
    loss = nn.functional.smooth_l1_loss(value(features[state[i]]), reward[i] + GAMMA * ahead)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), value.parameters()):
            slow.lerp_(fast, 0.1)
    if step % 25 == 0:
        print(step, f"{loss.item():.4f}")

error = []
with torch.no_grad():
    for _ in range(300):
        game = play()
        gain = sum(GAMMA**k * row[1] for k, row in enumerate(game))
        error.append((value(features[game[0][0]][None]).item() - gain) ** 2)
print("mean squared error of the value of unseen games:")
print(f"final loss {sum(error) / len(error):.4f}")
