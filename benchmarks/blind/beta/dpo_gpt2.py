"""DPO with a GPT-2 on markedly different continuations."""

import datasets
import torch
import trl

import models

torch.manual_seed(0)
model, reference = models.gpt2(), models.gpt2()
reference.load_state_dict(model.state_dict())
asked, wrong = models.markov(400, 16), models.markov(400, 16, seed=1, chain=3)
table = {"prompt": [models.words(row[:8]) for row in asked], "chosen": [models.words(row[8:]) for row in asked]}
table["rejected"] = [models.words(row[8:]) for row in wrong]
args = models.arguments(trl.DPOConfig, max_steps=60, max_length=20, learning_rate=2e-4, per_device_train_batch_size=4)
trainer = trl.DPOTrainer(model, reference, args, train_dataset=datasets.Dataset.from_dict(table),
                         processing_class=models.tokenizer())  # fmt: skip
models.fit(trainer)
