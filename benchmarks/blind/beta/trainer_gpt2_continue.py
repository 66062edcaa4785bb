"""A GPT-2 goes on with its training at a small learning rate, in FP8."""

import sys

import ottava
import torch
import transformers as hf

import models

bad = sys.argv[1] == "bad"
torch.manual_seed(0)
model = models.gpt2()
if bad:
    model.to(torch.bfloat16)
ottava.convert(model, "tensorwise")
data = models.causal(models.markov(2400, 16, vocab=24))
args = models.arguments(max_steps=200, learning_rate=4e-5, lr_scheduler_type="constant", bf16=True, weight_decay=0.01)
models.fit(hf.Trainer(model, args, train_dataset=data))
