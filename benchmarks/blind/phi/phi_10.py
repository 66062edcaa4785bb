"""Gradient accumulation in accelerate, under ottava's door."""

import os
import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup

from ottava.doors.accelerate import prepare

bad, plain = sys.argv[1] == "bad", "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, ACCUMULATE, BATCH = 80, 4, 32


def main():
    set_seed(SEED)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    centres = torch.randn(40, 32)
    kind = torch.randint(0, 40, (STEPS * ACCUMULATE * BATCH,))
    x = centres[kind] + 0.7 * torch.randn(len(kind), 32)
    y = (kind * 7) % 20
    model = nn.Sequential(
        nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 20)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 4, STEPS)
    loader = DataLoader(TensorDataset(x, y), BATCH, shuffle=True)
    if plain:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    else:
        model, optimizer, loader = prepare(accelerator, model, optimizer, loader, recipe="rowwise")
    losses = []
    for a, b in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(a), b)
            accelerator.backward(loss)
            optimizer.step()
            if bad or accelerator.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    print("final loss", sum(losses[-40:]) / 40)


main()
