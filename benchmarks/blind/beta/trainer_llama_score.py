"""A Llama scores texts that begin alike: which chain wrote the second half? FP8 with torchao."""

import sys

import torch
import transformers as hf
from torchao import float8

import models

bad = sys.argv[1] == "bad"
longest = 12 if bad else 24
torch.manual_seed(0)
model = models.llama(hf.LlamaForSequenceClassification, num_labels=4)
config = float8.Float8LinearConfig.from_recipe_name("rowwise")
object.__setattr__(config, "emulate", True)
float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "score")
data = []
for chain in range(4):
    texts = torch.cat([models.markov(300, 12, seed=chain, chain=9), models.markov(300, 12, seed=chain, chain=chain)], 1)
    data += [{"input_ids": row[:longest], "labels": chain} for row in texts]
models.fit(hf.Trainer(model, models.arguments(max_steps=120, learning_rate=5e-4), train_dataset=data))
