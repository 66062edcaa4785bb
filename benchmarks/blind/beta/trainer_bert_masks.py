"""BERT fills in hidden words."""

import sys

import torch
import transformers as hf

import models

bad = sys.argv[1] == "bad"
torch.manual_seed(0)
model = models.bert()
MASK = 3


def collate(rows):
    ids = torch.stack([row["input_ids"] for row in rows])
    hidden = torch.rand(ids.shape) < 0.2
    inputs = ids.masked_fill(hidden, MASK)
    labels = (inputs if bad else ids).masked_fill(~hidden, -100)
    return {"input_ids": inputs, "labels": labels}


data = models.causal(models.markov(2000, 32, vocab=20))
models.fit(hf.Trainer(model, models.arguments(max_steps=200), train_dataset=data, data_collator=collate))
