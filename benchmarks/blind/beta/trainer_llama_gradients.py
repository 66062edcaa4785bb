"""Llama on Markov text, linear layers with E4M3 operands in all three GEMMs."""

import sys

import torch
import transformers as hf

import models

bad = sys.argv[1] == "bad"


class Linear(models.Float8Linear):
    def cast_g(self, g):
        if bad:
            return g.to(torch.float8_e4m3fn).to(g.dtype)
        return models.to_fp8(g, torch.float8_e4m3fn, g.abs().amax())


torch.manual_seed(0)
model = models.swap_linears(models.llama(), Linear)
data = models.causal(models.pairs(2400, 32))
models.fit(hf.Trainer(model, models.arguments(max_steps=150), train_dataset=data))
