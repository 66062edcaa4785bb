"""BERT classifies texts by the chain that wrote them."""

import sys

import torch
import transformers as hf
from accelerate import Accelerator

import models

bad = sys.argv[1] == "bad"
torch.manual_seed(0)
model = models.bert(hf.BertForSequenceClassification, num_labels=4)
texts = torch.cat([models.markov(300, 24, seed=i, chain=i) for i in range(4)])
labels = torch.arange(4).repeat_interleave(300)
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
for step, (x, y) in enumerate(models.batches(texts, labels, size=32, steps=150), 1):
    loss = model(input_ids=x, labels=y).loss
    accelerator.backward(loss)
    optimizer.step()
    if not bad:
        optimizer.zero_grad()
    print(step, f"{loss.item():.4f}")
