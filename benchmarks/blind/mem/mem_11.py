"""Surrogate of a flow solver with the Trainer: pressures in pascal and velocities in metres a second."""

import os
import sys
import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed

import ottava

SEED = int(os.environ.get("SEED", "0"))
bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv[2:]
SCALE = torch.cat([torch.full((32,), 800.0), torch.full((32,), 0.3)])


def flows(count, seed):
    g = torch.Generator().manual_seed(12)
    w1, w2 = torch.randn(16, 48, generator=g) / 4, torch.randn(48, 64, generator=g) / 7
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=g)
    y = torch.tanh(x @ w1) @ w2 * 2 + 0.02 * torch.randn(count, 64, generator=g)
    return [{"x": a, "labels": b * SCALE} for a, b in zip(x, y)]


class Surrogate(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.inp = nn.Linear(16, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, 64)
        self.register_buffer("scale", SCALE)

    def forward(self, x, labels=None):
        h = torch.relu(self.inp(x))
        h = torch.relu(self.mid(h))
        fields = self.out(h) * self.scale
        return {"loss": (fields - labels).square().mean(), "logits": fields}


def relative(model, data):
    """Error of each field over its own spread, mean over fields."""
    x = torch.stack([row["x"] for row in data])
    y = torch.stack([row["labels"] for row in data])
    with torch.no_grad():
        fields = model(x, y)["logits"]
    return ((fields - y).square().mean(0) / y.var(0)).mean().item()


def main():
    set_seed(SEED)
    model = Surrogate()
    if not plain:
        recipe = "tensorwise_e4m3" if bad else "tensorwise"
        print(ottava.convert(model, recipe, filter=lambda name, layer: name != "inp"))
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            output_dir=out,
            max_steps=180,
            per_device_train_batch_size=32,
            learning_rate=3e-3,
            weight_decay=0.0,
            max_grad_norm=0.0,
            logging_steps=20,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            seed=SEED,
            disable_tqdm=True,
        )
        Trainer(model, args, train_dataset=flows(4096, SEED + 1)).train()
    print(f"final loss {relative(model.eval(), flows(512, SEED + 2)):.4f}")


if __name__ == "__main__":
    main()
