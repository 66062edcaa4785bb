"""GPT-2 in FP8 with gradient accumulation and a learning rate that restarts."""

import ottava
import torch
import transformers as hf

import models

torch.manual_seed(0)
model = models.gpt2()
ottava.convert(model, "tensorwise")
args = models.arguments(max_steps=90, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=3e-3,
                        lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 3})  # fmt: skip
models.fit(hf.Trainer(model, args, train_dataset=models.causal(models.markov(1200, 32))))
