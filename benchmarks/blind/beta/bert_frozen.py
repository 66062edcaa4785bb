"""A classifier on a BERT whose embeddings and first layer are frozen."""

import torch
import transformers as hf

import models

torch.manual_seed(0)
model = models.bert(hf.BertForSequenceClassification, num_labels=4)
model.bert.embeddings.requires_grad_(False)
model.bert.encoder.layer[0].requires_grad_(False)
data = []
for chain in range(4):
    data += [{"input_ids": row, "labels": chain} for row in models.markov(300, 24, seed=chain, chain=chain)]
models.fit(hf.Trainer(model, models.arguments(max_steps=120), train_dataset=data))
