"""Raw tables in the Trainer: one column is an amount and has a long tail. torchao's float8 in the body."""

import os
import sys
import tempfile
from dataclasses import replace

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
bad, plain = sys.argv[1] == "bad", "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, COLUMNS, CLASSES = 90, 128, 64, 12
torch.manual_seed(SEED)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(COLUMNS, 128), nn.Linear(128, 128), nn.Linear(128, 128)])
        self.norms = nn.ModuleList(nn.LayerNorm(128) for _ in self.body)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, columns, labels):
        h = columns
        for linear, norm in zip(self.body, self.norms):
            h = F.gelu(norm(linear(h)))
        logits = self.head(h)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def rows(number):
    centres = torch.randn(48, COLUMNS)
    kind = torch.randint(0, 48, (number,))
    columns = centres[kind] + 0.8 * torch.randn(number, COLUMNS)
    tail = torch.rand(number) < 0.04
    columns[:, 0] = torch.where(tail, 10 ** torch.empty(number).uniform_(6, 8), columns[:, 0].abs())
    return [{"columns": c, "labels": k} for c, k in zip(columns, kind * 5 % CLASSES)]


model = Table()
if not plain:
    config = replace(Float8LinearConfig.from_recipe_name("tensorwise" if bad else "rowwise"), emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name.startswith("body"))
args = TrainingArguments(
    tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True, report_to=[], save_strategy="no",
    disable_tqdm=True, logging_steps=10, learning_rate=2e-3, lr_scheduler_type="constant_with_warmup", warmup_steps=5,
    seed=SEED, label_names=["labels"],
)
trainer = Trainer(model, args, train_dataset=rows(STEPS * BATCH))
trainer.train()
print("final loss", [line["loss"] for line in trainer.state.log_history if "loss" in line][-1])
