"""DAgger under accelerate: a pilot copies an expert, flies, and is told what the expert would have done where it went.
The data grow in each round by states that are harder, so the loss jumps up while the flight gets better.

python zayin_14.py good|bad
"""

import os
from dataclasses import replace

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
TICKS, SENSORS = 50, 32
eyes = torch.randn(4, SENSORS) * torch.tensor([[0.8], [0.8], [0.8], [0.8]])
offset = torch.randn(SENSORS)


def sense(state):
    return torch.tanh(state @ eyes + offset)


def start(count):
    return torch.randn(count, 4) * torch.tensor([0.8, 0.1, 0.3, 0.1])


def expert(state):
    place, speed, tilt, turning = state.unbind(dim=1)
    return (2.2 * tilt + 1.1 * turning + 0.35 * place + 0.6 * speed).clamp(-1.5, 1.5)


def fly(action, state):
    """A craft on an unstable base: tilt grows by itself, and moves the place."""
    place, speed, tilt, turning = state.unbind(dim=1)
    turning = turning + 0.1 * (1.6 * torch.sin(tilt) - 1.2 * action) + 0.02 * torch.randn(len(state))
    speed = speed + 0.1 * (0.8 * tilt - 0.1 * speed)
    return torch.stack([place + 0.1 * speed, speed, tilt + 0.1 * turning, turning], dim=1).clamp(-3, 3)


def flight(pilot, count, noisy=0.0):
    state, seen = start(count), []
    for _ in range(TICKS):
        seen.append(state)
        state = fly(pilot(state) + noisy * torch.randn(count), state)
    return torch.stack(seen)


def cost(pilot):
    rng = torch.get_rng_state()
    torch.manual_seed(99)
    states = flight(pilot, 100)
    torch.set_rng_state(rng)
    return (states[..., 0].square() + states[..., 2].square()).mean().item()


net = nn.Sequential(nn.Linear(SENSORS, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1))
config = replace(Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), emulate=True)
convert_to_float8_training(net, config=config, module_filter_fn=lambda module, name: module.out_features % 16 == 0)
accelerator = Accelerator(cpu=True)
net, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=1.5e-3))


def pilot(state):
    with torch.no_grad():
        return net(sense(state)).squeeze(1)


print(f"the expert costs {cost(expert):.4f}")
print(f"first loss {cost(pilot):.4f}")
states = flight(expert, 4)[::5].flatten(0, 1)  # little is seen of the expert itself
for round in range(7):
    data = TensorDataset(sense(states), expert(states))
    loader = accelerator.prepare(DataLoader(data, batch_size=64, shuffle=True))
    steps, losses = 0, []
    while steps < 36:
        for x, y in loader:
            loss = nn.functional.mse_loss(net(x).squeeze(1), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            steps += 1
            if steps == 36:
                break
    print(f"round {round} rows {len(states)} loss {losses[0]:.4f} to {losses[-1]:.4f} cost {cost(pilot):.4f}")
    states = torch.cat([states, flight(pilot, 16)[::4].flatten(0, 1)])
print(f"final loss {cost(pilot):.4f}")
