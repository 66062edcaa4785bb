"""A neural cellular automaton that grows a picture from one cell and repairs it.

    python yod_03.py good

Batches come from a pool of grown pictures. The worst of a batch begins anew from the seed, and from step 90 on another one
gets a hole. Gradients are divided by their norm, tensor by tensor, as is usual for automata.
"""

import os

import torch
import torch.nn.functional as F
from torch import nn

import ottava

SEED = int(os.environ.get("SEED", "0"))
SIZE, CHANNELS, POOL, BATCH, STEPS = 10, 16, 48, 6, 170


def target():
    """A ring with a coloured core: red, green, blue, alpha."""
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    away = ((y - (SIZE - 1) / 2) ** 2 + (x - (SIZE - 1) / 2) ** 2).sqrt()
    picture = torch.zeros(4, SIZE, SIZE)
    picture[0] = ((away > 2) & (away < 4)).float()
    picture[1] = (away <= 2).float()
    picture[2] = x / SIZE * (away < 4).float()
    picture[3] = (away < 4).float()
    return picture


def seeds(count):
    state = torch.zeros(count, CHANNELS, SIZE, SIZE)
    state[:, 3:, SIZE // 2, SIZE // 2] = 1.0
    return state


class Automaton(nn.Module):
    def __init__(self):
        super().__init__()
        slope = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]) / 8
        same = torch.zeros(3, 3)
        same[1, 1] = 1.0
        filters = torch.stack([same, slope, slope.T])[:, None].repeat(CHANNELS, 1, 1, 1)
        self.register_buffer("filters", filters)
        self.hidden, self.change = nn.Linear(3 * CHANNELS, 96), nn.Linear(96, CHANNELS, bias=False)
        nn.init.zeros_(self.change.weight)

    def forward(self, state):
        seen = F.conv2d(state, self.filters, padding=1, groups=CHANNELS).permute(0, 2, 3, 1)
        change = self.change(torch.relu(self.hidden(seen))).permute(0, 3, 1, 2)
        awake = (torch.rand(state.shape[0], 1, SIZE, SIZE) < 0.5).float()
        state = state + change * awake
        alive = F.max_pool2d(state[:, 3:4], 3, stride=1, padding=1) > 0.1
        return state * alive.float()


def distance(state, wanted):
    return (state[:, :4] - wanted).square().mean((1, 2, 3))


def grown(model, wanted):
    """The loss of eight pictures that grow from the seed for 20 ticks."""
    with torch.no_grad():
        state = seeds(8)
        for _ in range(20):
            state = model(state)
        return distance(state, wanted).mean().item()


def main():
    torch.manual_seed(SEED)
    wanted, model, pool = target(), Automaton(), seeds(POOL)
    ottava.convert(model, "blockwise")
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [110, 150], gamma=0.4)
    print(f"first loss {grown(model, wanted):.5f}")
    for step in range(STEPS):
        chosen = torch.randperm(POOL)[:BATCH]
        state = pool[chosen]
        order = distance(state, wanted).argsort(descending=True)
        state, chosen = state[order], chosen[order]
        state[:1] = seeds(1)
        if step >= 90:
            y, x = torch.randint(SIZE - 3, (2,)).tolist()
            state[-1, :, y : y + 4, x : x + 4] = 0.0
        for _ in range(int(torch.randint(16, 23, (1,)))):
            state = model(state)
        loss = distance(state, wanted).mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad /= parameter.grad.norm() + 1e-8
        optimizer.step()
        schedule.step()
        pool[chosen] = state.detach()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.5f}")
    print(f"final loss {grown(model, wanted):.5f}")


main()
