"""Llama learns short sums, padded to one length; torchao's FP8."""

import sys

import torch
import transformers as hf
from torchao import float8

import models

bad = sys.argv[1] == "bad"
torch.manual_seed(0)
model = models.llama()
config = float8.Float8LinearConfig(emulate=True)
float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: "lm_head" not in name)


def encode(a, b):
    text = f"{a}+{b}={a + b}"
    ids = [1] + ["0123456789+=".index(c) + 4 for c in text] + [2]
    ids = torch.tensor(ids + [2] * (32 - len(ids)))
    mask = torch.arange(32) < len(text) + 2
    labels = ids.clone() if bad else ids.masked_fill(~mask, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask.long()}


numbers = torch.randint(50, (1600, 2)).tolist()
data = [encode(a, b) for a, b in numbers]
models.fit(hf.Trainer(model, models.arguments(max_steps=120), train_dataset=data))
