"""Contrastive pairs with a margin on Euclidean distances; torchao's float8, row-wise."""

import os
import sys

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", "0"))
torch.manual_seed(SEED)


def distance(a, b):
    square = (a - b).square().sum(-1)
    return torch.sqrt(square + 1e-8 if MODE == "good" else square)


def contrastive(a, b, same, margin=2.0):
    d = distance(a, b)
    return torch.where(same, d, torch.relu(margin - d)).mean()


def pairs(step, centers):
    kinds = torch.randint(16, (2, 64))
    same = torch.rand(64) < 0.5
    kinds[1] = torch.where(same, kinds[0], kinds[1])
    same = kinds[0] == kinds[1]
    a, b = (centers[k] + 0.4 * torch.randn(64, 32) for k in kinds)
    if step % 100 == 41 + 3 * SEED:
        b[7] = a[7]  # the same picture twice in the collection
        same[7] = True
    return a, b, same


def main():
    centers = torch.randn(16, 32)
    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 16))
    if not PLAIN:
        config = Float8LinearConfig.from_recipe_name("rowwise")
        config = Float8LinearConfig(**{**config.__dict__, "emulate": True})
        convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "4")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(90):
        a, b, same = pairs(step, centers)
        loss = contrastive(model(a), model(b), same)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    print(f"final loss {sum(losses[-10:]) / 10:.4f}")


main()
