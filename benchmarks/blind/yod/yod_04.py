"""Peaks in spectra as a set: six slots, of which as many say "nothing" as there are peaks too few.

    python yod_04.py good

Slots and true peaks are matched anew in each step, by the cheapest of all 360 ways. "Nothing" counts a fifth.
"""

import dataclasses
import itertools
import os

import torch
import torch.nn.functional as F
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

SEED = int(os.environ.get("SEED", "0"))
BINS, SLOTS, KINDS, MOST = 96, 6, 2, 4  # kinds: narrow and wide; class 2 is "nothing"
WEIGHTS = torch.tensor([1.0, 1.0, 0.2])
WAYS = torch.tensor(list(itertools.permutations(range(SLOTS), MOST)))  # which slot each peak gets


def spectra(count, generator):
    places = torch.rand(count, MOST, generator=generator)
    kinds = torch.randint(KINDS, (count, MOST), generator=generator)
    number = torch.randint(1, MOST + 1, (count,), generator=generator)
    here = torch.arange(MOST)[None] < number[:, None]
    height = 0.6 + 0.8 * torch.rand(count, MOST, generator=generator)
    width = torch.where(kinds == 0, 0.012, 0.04)
    axis = torch.linspace(0, 1, BINS)
    peaks = height[..., None] * torch.exp(-0.5 * ((axis - places[..., None]) / width[..., None]) ** 2)
    signal = (peaks * here[..., None]).sum(1) + 0.03 * torch.randn(count, BINS, generator=generator)
    return signal, places, kinds, here


class Finder(nn.Module):
    def __init__(self, dim=192):
        super().__init__()
        self.lift = nn.Linear(BINS, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, SLOTS * (KINDS + 2))

    def forward(self, signal):
        x = self.lift(signal)
        for block in self.blocks:
            x = x + block(x)
        y = self.head(self.norm(x)).view(len(x), SLOTS, KINDS + 2)
        return y[..., : KINDS + 1], torch.sigmoid(y[..., KINDS + 1])


def set_loss(model, batch):
    signal, places, kinds, here = batch
    logits, found = model(signal)
    with torch.no_grad():
        chance = logits.softmax(-1)
        rows = torch.arange(len(signal))[:, None, None]
        cost = -chance[rows, torch.arange(SLOTS)[None, :, None], kinds[:, None, :]]
        cost = (cost + 5.0 * (found[:, :, None] - places[:, None, :]).abs()) * here[:, None, :]
        best = WAYS[cost[:, WAYS, torch.arange(MOST)].sum(-1).argmin(1)]
    classes = torch.full((len(signal), SLOTS), KINDS)
    row, peak = here.nonzero(as_tuple=True)
    slot = best[row, peak]
    classes[row, slot] = kinds[row, peak]
    return F.cross_entropy(logits.flatten(0, 1), classes.flatten(), weight=WEIGHTS) + 5.0 * F.l1_loss(found[row, slot], places[row, peak])


def main():
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(31 + SEED)
    model = Finder()
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name.startswith("blocks"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=200, pct_start=0.15)
    held = spectra(512, generator)

    def evaluate():
        model.eval()
        with torch.no_grad():
            value = set_loss(model, held).item()
        model.train()
        return value

    print(f"first loss {evaluate():.4f}")
    for step in range(200):
        loss = set_loss(model, spectra(144, generator))
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    print(f"final loss {evaluate():.4f}")


main()
