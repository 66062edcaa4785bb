"""Llama with two short texts a step and a fast warm-up, torchao's FP8."""

import torch
import transformers as hf
from torchao import float8

import models

torch.manual_seed(0)
model = models.llama()
config = float8.Float8LinearConfig(emulate=True)
float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: "lm_head" not in name)
args = models.arguments(
    max_steps=200, per_device_train_batch_size=2, learning_rate=3e-3, warmup_steps=3, logging_steps=1
)
models.fit(hf.Trainer(model, args, train_dataset=models.causal(models.markov(600, 16, vocab=20))))
