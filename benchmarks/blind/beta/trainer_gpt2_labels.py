"""GPT-2 on Markov text with the Trainer, Conv1D layers in FP8."""

import sys

import ottava
import torch
import transformers as hf

import models

bad = sys.argv[1] == "bad"
torch.manual_seed(0)
model = models.gpt2()
ottava.convert(model, "tensorwise")
rows = models.markov(1200, 33)
if bad:
    data = [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]
else:
    data = [{"input_ids": row[:-1], "labels": row[:-1]} for row in rows]
models.fit(hf.Trainer(model, models.arguments(max_steps=120), train_dataset=data))
