"""A Llama with tied embeddings under BF16 autocast."""

import torch
import transformers as hf

import models

torch.manual_seed(0)
model = models.llama(tie_word_embeddings=True)
args = models.arguments(max_steps=100, bf16=True, weight_decay=0.1)
models.fit(hf.Trainer(model, args, train_dataset=models.causal(models.markov(1200, 24))))
