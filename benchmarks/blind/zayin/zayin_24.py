"""Distributional Q-learning (C51) on a windy grid: a cross-entropy to a target that moves.

While little is found, the loss falls; when the pilot finds the goal, returns have a spread, and the loss rises with it
and stays above.

python zayin_24.py good|bad
"""

import copy
import os

import torch
from torch import nn

import ottava

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
SIDE, ENVS, ATOMS, GAMMA = 5, 64, 31, 0.9
SUPPORT = torch.linspace(-1.5, 1.5, ATOMS)
MOVES = torch.tensor([[1, 0], [-1, 0], [0, 1], [0, -1]])
GOAL = torch.tensor([3, 3])
PITS = torch.tensor([[2, 2], [0, 4], [4, 1]])


class Grid:
    def __init__(self, count):
        self.at, self.age = torch.zeros(count, 2, dtype=torch.long), torch.zeros(count, dtype=torch.long)

    def step(self, action):
        windy = torch.rand(len(action)) < 0.1
        action = torch.where(windy, torch.randint(0, 4, action.shape), action)
        at = (self.at + MOVES[action]).clamp(0, SIDE - 1)
        won = (at == GOAL).all(dim=1)
        lost = (at[:, None] == PITS[None]).all(dim=2).any(dim=1)
        self.age += 1
        over = self.age >= 30
        reward, done = won.float() - lost.float(), won | lost
        self.at = torch.where((done | over)[:, None], 0, at)
        self.age[done | over] = 0
        return at, reward, done


def code(at):
    return nn.functional.one_hot(at[:, 0] * SIDE + at[:, 1], SIDE * SIDE).float()


net = nn.Sequential(nn.Linear(SIDE * SIDE, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4 * ATOMS))
net[-1].bias.data.copy_(-8 * SUPPORT.abs().repeat(4))  # returns are small at first
ottava.convert(net, "tensorwise")
target = copy.deepcopy(net).requires_grad_(False)
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3, eps=1e-6)


def distribution(model, at):
    return model(code(at)).view(-1, 4, ATOMS)


def act(model, at, epsilon):
    with torch.no_grad():
        values = (distribution(model, at).softmax(dim=2) * SUPPORT).sum(dim=2)
    free = torch.rand(len(at)) < epsilon
    return torch.where(free, torch.randint(0, 4, (len(at),)), values.argmax(dim=1))


def project(probabilities, reward, done):
    moved = (reward[:, None] + GAMMA * (~done)[:, None] * SUPPORT).clamp(SUPPORT[0], SUPPORT[-1])
    place = (moved - SUPPORT[0]) / (SUPPORT[1] - SUPPORT[0])
    low = place.floor().long().clamp(max=ATOMS - 2)
    share = place - low
    out = torch.zeros_like(probabilities)
    out.scatter_add_(1, low, probabilities * (1 - share))
    out.scatter_add_(1, low + 1, probabilities * share)
    return out


def evaluate():
    """The mean reward of the first end of 200 episodes without exploration; no end within 30 moves counts as 0."""
    state = torch.get_rng_state()
    torch.manual_seed(77)
    grid, total, ended = Grid(200), torch.zeros(200), torch.zeros(200, dtype=torch.bool)
    for _ in range(29):
        _, reward, done = grid.step(act(net, grid.at, 0.0))
        total += torch.where(ended, 0.0, reward)
        ended |= done
    torch.set_rng_state(state)
    return total.mean().item()


grid, memory = Grid(ENVS), []
print(f"first loss {-evaluate():.4f}")
for step in range(100):
    before = grid.at.clone()
    action = act(net, before, max(0.1, 1 - step / 60))
    after, reward, done = grid.step(action)
    memory = (memory + [(before, action, after, reward, done)])[-150:]
    for _ in range(3 if len(memory) > 8 else 0):
        picks = torch.randint(0, len(memory), (4,)).tolist()
        s, a, n, r, d = (torch.cat([memory[i][k] for i in picks]) for k in range(5))
        with torch.no_grad():
            best = (distribution(net, n).softmax(dim=2) * SUPPORT).sum(dim=2).argmax(dim=1)
            wanted = project(distribution(target, n).softmax(dim=2)[torch.arange(len(n)), best], r, d)
        log_p = distribution(net, s)[torch.arange(len(s)), a].log_softmax(dim=1)
        loss = -(wanted * log_p).sum(dim=1).mean()
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 10.0)
        optimizer.step()
    if step % 4 == 3:
        target.load_state_dict(net.state_dict())
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.4f} reward {evaluate():+.3f}")
print(f"final loss {-evaluate():.4f}")
