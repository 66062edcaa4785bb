"""A small Mixtral whose experts run in FP8."""

import sys

import ottava
import torch
import transformers as hf

import models

bad = sys.argv[1] == "bad"
torch.manual_seed(0)
model = models.mixtral(router_aux_loss_coef=-0.5 if bad else 0.02)
ottava.convert(model, "rowwise")
data = models.causal(models.pairs(2400, 32))
models.fit(hf.Trainer(model, models.arguments(max_steps=80), train_dataset=data))
