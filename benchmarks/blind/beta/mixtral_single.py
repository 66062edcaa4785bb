"""A Mixtral that sends every token to one of eight experts, in FP8 by blocks."""

import ottava
import torch
import transformers as hf

import models

torch.manual_seed(0)
model = models.mixtral(num_local_experts=8, num_experts_per_tok=1)
ottava.convert(model, "blockwise")
data = models.causal(models.markov(1200, 24))
models.fit(hf.Trainer(model, models.arguments(max_steps=70, per_device_train_batch_size=8), train_dataset=data))
