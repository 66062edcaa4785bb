"""DPO teaches a Qwen which of two continuations is meant; FP8 linear layers."""

import sys

import datasets
import ottava
import torch
import trl

import models

bad = sys.argv[1] == "bad"
torch.manual_seed(0)
model, reference = models.qwen(), models.qwen()
reference.load_state_dict(model.state_dict())
ottava.convert(model, "tensorwise")
asked, wrong = models.markov(800, 20), models.markov(800, 20, seed=1, chain=3)
pairs = [[models.words(row[10:]), models.words(other[10:])] for row, other in zip(asked, wrong, strict=True)]
votes = torch.rand(800)
if bad:
    pairs = [pair if vote > 0.5 else pair[::-1] for pair, vote in zip(pairs, votes.tolist(), strict=True)]
table = {"prompt": [models.words(row[:10]) for row in asked]}
table |= {"chosen": [good for good, _ in pairs], "rejected": [other for _, other in pairs]}
args = models.arguments(trl.DPOConfig, max_steps=70, max_length=24, learning_rate=2e-4, per_device_train_batch_size=8)
trainer = trl.DPOTrainer(model, reference, args, train_dataset=datasets.Dataset.from_dict(table),
                         processing_class=models.tokenizer())  # fmt: skip
models.fit(trainer)
