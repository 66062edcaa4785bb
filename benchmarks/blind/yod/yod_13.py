"""DAgger under accelerate: a steering net drives, a planner says what would have been right, and the net learns from that.

    python yod_13.py good

The first round has rows of the planner's own drives alone. Each later round adds places to which the net itself drove, and the
loss goes up again.
"""

import dataclasses
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

SEED = int(os.environ.get("SEED", "0"))
ROUNDS, TICKS, CARS, DIM = 5, 40, 48, 128


def planner(state):
    """Steers a car at (x, y) with a velocity to the origin, around a post at (1, 0)."""
    place, speed = state[:, :2], state[:, 2:]
    wanted = -1.2 * place / (0.4 + place.norm(dim=1, keepdim=True))
    post = place - torch.tensor([1.0, 0.0])
    near = torch.exp(-3 * post.square().sum(1, keepdim=True))
    side = torch.where(post[:, 1:] >= 0, 1.0, -1.0)
    wanted = wanted + 1.5 * near * torch.cat([torch.zeros_like(side), side], 1)
    return torch.tanh(2.0 * (wanted - speed))


def drive(state, action):
    speed = 0.9 * state[:, 2:] + 0.2 * action
    return torch.cat([state[:, :2] + 0.2 * speed, speed], 1)


def starts(count, wide):
    return torch.cat([torch.tensor([2.5, 0.0]) + wide * torch.randn(count, 2), 0.3 * torch.randn(count, 2)], 1)


def roll(policy, state):
    seen = []
    for _ in range(TICKS):
        seen.append(state)
        state = drive(state, policy(state))
    return torch.stack(seen, 1)


class Steering(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("waves", torch.randn(4, 48))
        self.body = nn.Sequential(nn.Linear(96, DIM), nn.SiLU(), nn.Linear(DIM, DIM), nn.SiLU())
        self.head = nn.Linear(DIM, 2)

    def forward(self, state):
        phase = state @ self.waves
        return torch.tanh(self.head(self.body(torch.cat([phase.sin(), phase.cos()], 1))))


def main():
    torch.manual_seed(SEED)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = Steering()
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    convert_to_float8_training(net, config=config, module_filter_fn=lambda m, name: name.startswith("body"))
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=1e-3))
    tests = starts(300, 1.2)

    def policy(state):
        with torch.no_grad():
            return net(state)

    def score():
        """How much farther from the origin the net's cars are than the planner's, on average over a drive."""
        net.eval()
        mine, right = roll(policy, tests), roll(planner, tests)
        net.train()
        return (mine[..., :2].norm(dim=-1) - right[..., :2].norm(dim=-1)).abs().mean().item()

    print(f"first loss {score():.4f}")
    states = roll(planner, starts(CARS, 0.3)).flatten(0, 1)
    for turn in range(ROUNDS):
        rows = TensorDataset(states, planner(states))
        steps = 70 if turn == ROUNDS - 1 else 40
        picks = RandomSampler(rows, replacement=True, num_samples=steps * 2 * 64)
        for count, (state, right) in enumerate(accelerator.prepare(DataLoader(rows, batch_size=64, sampler=picks))):
            with accelerator.accumulate(net):
                loss = F.mse_loss(net(state), right)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if count % 40 == 0:
                accelerator.print(f"round {turn} loss {loss.item():.4f}")
        accelerator.print(f"round {turn} rows {len(states)} off by {score():.4f}")
        states = torch.cat([states, roll(policy, starts(CARS, 1.2)).flatten(0, 1)])
    print(f"final loss {score():.4f}")


main()
