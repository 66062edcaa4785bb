"""A GFlowNet writes strings of twelve bits with a chance in proportion to their reward.

    python yod_11.py good

Trajectory balance: the squared difference of what was drawn and what it is worth, in logarithms. The loss begins near 10,
since most strings are worth a thousandth. The total of rewards is a parameter with a rate of its own.
"""

import dataclasses
import os

import torch
import torch.nn.functional as F
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

SEED = int(os.environ.get("SEED", "0"))
BITS, BATCH, STEPS = 12, 64, 200


def all_strings():
    return (torch.arange(2**BITS)[:, None] >> torch.arange(BITS)) & 1


class Worth:
    """Rewards are high near four hidden strings and 0.001 far from all of them."""

    def __init__(self, generator):
        self.modes = torch.randint(2, (4, BITS), generator=generator)

    def log(self, strings):
        away = (strings[:, None] != self.modes[None]).sum(-1).float()
        return torch.log(0.001 + torch.exp(-1.6 * away).sum(1))


class Writer(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.lift = nn.Linear(3 * BITS + 12, dim)
        self.middle = nn.Sequential(nn.ReLU(), nn.Linear(dim, dim), nn.LayerNorm(dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU())
        self.head = nn.Linear(dim, 2)
        self.total = nn.Parameter(torch.zeros(()))

    def forward(self, strings, place):
        """Logits of the bit at each place, given those before it; `place` has one number a row."""
        known = torch.arange(BITS)[None] < place[:, None]
        seen = F.one_hot(torch.where(known, strings, 2), 3).flatten(1).float()
        return self.head(self.middle(self.lift(torch.cat([seen, F.one_hot(place, BITS).float()], 1))))


def draw(model, count, explore):
    strings = torch.zeros(count, BITS, dtype=torch.long)
    with torch.no_grad():
        for place in range(BITS):
            chance = model(strings, torch.full((count,), place)).softmax(-1)
            chance = (1 - explore) * chance + explore / 2
            strings[:, place] = torch.multinomial(chance, 1)[:, 0]
    return strings


def log_chance(model, strings):
    rows = strings.repeat_interleave(BITS, 0)
    place = torch.arange(BITS).repeat(len(strings))
    logs = model(rows, place).log_softmax(-1)
    return logs[torch.arange(len(rows)), rows[torch.arange(len(rows)), place]].view(-1, BITS).sum(1)


def off(model, worth):
    """Half the absolute difference of both distributions, over all 4,096 strings."""
    strings = all_strings()
    with torch.no_grad():
        mine = torch.cat([log_chance(model, part) for part in strings.split(1024)]).exp()
    return (mine - worth.log(strings).softmax(0)).abs().sum().item() / 2


def main():
    torch.manual_seed(SEED)
    worth, model = Worth(torch.Generator().manual_seed(12 + SEED)), Writer()
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name.startswith("middle"))
    net = [p for name, p in model.named_parameters() if name != "total"]
    optimizer = torch.optim.Adam([{"params": net, "lr": 2e-3}, {"params": [model.total], "lr": 0.1}])
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [140, 175], gamma=0.3)
    print(f"first loss {off(model, worth):.4f}")
    for step in range(STEPS):
        strings = draw(model, BATCH, explore=0.3 * max(0.0, 1 - step / 150))
        gap = model.total + log_chance(model, strings) - worth.log(strings)
        loss = gap.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f} total {model.total.item():.3f}")
    print(f"final loss {off(model, worth):.4f}")


main()
