"""Co-teaching under accelerate: three labels in ten are wrong, two nets learn side by side, and each picks the rows
that the other learns from.

A row counts if its loss is among the smallest; the share of rows that do not count goes from 0 to 0.3. The mean loss
of all rows grows again.
"""

import dataclasses
import logging
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

logging.getLogger("torchao").setLevel(logging.ERROR)
SEED = int(os.environ.get("SEED", "0"))
INPUTS, CLASSES, NOISE, STEPS = 32, 8, 0.3, 240


def net():
    """Three layers; the last one stays in high precision."""
    model = nn.Sequential(
        nn.Linear(INPUTS, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 128), nn.BatchNorm1d(128), nn.ReLU(),
        nn.Linear(128, CLASSES),
    )
    fp8 = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), emulate=True)
    return convert_to_float8_training(model, config=fp8, module_filter_fn=lambda m, name: name != "6")


def rows(number, teacher, generator):
    """Labels by a random net of two layers."""
    x = torch.randn(number, INPUTS, generator=generator)
    return x, ((x @ teacher[0]).tanh() @ teacher[1]).argmax(1)


@torch.no_grad()
def evaluate(models, x, y):
    """Cross-entropy of the mean of both nets on clean labels."""
    for model in models:
        model.eval()
    logs = torch.stack([model(x).float().softmax(-1) for model in models]).mean(0).clamp(min=1e-9).log()
    for model in models:
        model.train()
    return F.nll_loss(logs, y).item(), (logs.argmax(1) == y).float().mean().item()


def main():
    set_seed(SEED)
    generator = torch.Generator().manual_seed(300 + SEED)
    teacher = torch.randn(INPUTS, 12, generator=generator) / 4, torch.randn(12, CLASSES, generator=generator)
    x, y = rows(6000, teacher, generator)
    held = rows(1000, teacher, generator)
    wrong = torch.rand(len(y), generator=generator) < NOISE
    y = torch.where(wrong, torch.randint(0, CLASSES, y.shape, generator=generator), y)

    accelerator = Accelerator(cpu=True)
    models = [net(), net()]
    optimizers = [torch.optim.Adam(m.parameters(), 2e-3) for m in models]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=128, shuffle=True, drop_last=True)
    prepared = accelerator.prepare(*models, *optimizers, loader)
    models, optimizers, loader = prepared[:2], prepared[2:4], prepared[4]
    print("first loss", round(evaluate(models, *held)[0], 4))

    step = 0
    while step < STEPS:
        for batch, labels in loader:
            keep = int(len(batch) * (1 - NOISE * min(1.0, step / 100)))
            losses = [F.cross_entropy(m(batch), labels, reduction="none") for m in models]
            small = [loss.detach().argsort()[:keep] for loss in losses]
            for own, other, optimizer in zip(losses, reversed(small), optimizers, strict=True):
                accelerator.backward(own[other].mean())
                optimizer.step()
                optimizer.zero_grad()
            if step % 40 == 0:
                loss, right = evaluate(models, *held)
                print(step, "all rows", round(losses[0].mean().item(), 4), "held", round(loss, 4), round(right, 3))
            step += 1
            if step == STEPS:
                break
    print("final loss", round(evaluate(models, *held)[0], 4))


if __name__ == "__main__":
    main()
