"""Machine state from log records, the first record of a sequence being the header; transformers' Trainer and torchao's float8."""

import os
import sys

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import Trainer, TrainingArguments, set_seed

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", "0"))
CLASSES, LENGTH, FIELDS, WIDTH = 8, 12, 32, 64


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.records = nn.Linear(FIELDS, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.out = nn.LayerNorm(WIDTH)
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, records, labels=None):
        x = self.norm(self.records(records))
        x = x + self.down(nn.functional.gelu(self.up(x)))
        logits = self.classifier(self.out(x.mean(1)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make(count):
    centers = torch.randn(CLASSES, FIELDS)
    labels = torch.randint(CLASSES, (count,))
    records = 0.5 * centers[labels][:, None] + torch.randn(count, LENGTH, FIELDS)
    # header: sizes in bytes, uptime in microseconds
    records[:, 0] = torch.randn(count, FIELDS) * 3e6
    return [{"records": r, "labels": y} for r, y in zip(records, labels)]


def main():
    set_seed(SEED)
    data = make(1280)
    model = Encoder()
    if not PLAIN:
        recipe = "rowwise_with_gw_hp" if MODE == "good" else "tensorwise"
        config = Float8LinearConfig.from_recipe_name(recipe)
        config = Float8LinearConfig(**{**config.__dict__, "emulate": True})
        convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "classifier")
    args = TrainingArguments(
        "out", max_steps=80, per_device_train_batch_size=16, learning_rate=2e-3, warmup_steps=5, logging_steps=5, report_to=[], save_strategy="no",
        disable_tqdm=True, use_cpu=True, seed=SEED,
    )
    trainer = Trainer(model, args, train_dataset=data)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    print(f"final loss {sum(map(float, losses[-3:])) / 3:.4f}")


main()
