"""Llama with a strong marker token in front of every text, trained with torchao's Float8Linear."""

import sys

import torch
import transformers as hf
from torchao import float8

import models

bad = sys.argv[1] == "bad"
torch.manual_seed(0)
model = models.llama(num_hidden_layers=1)


class Gate(torch.nn.Module):
    """SiLU that answers strongly at the marker, as trained models do at their first token."""

    def forward(self, x):
        strong = torch.ones_like(x)
        strong[:, 0] = 1e8
        return torch.nn.functional.silu(x) * strong


for layer in model.model.layers:
    layer.mlp.act_fn = Gate()
recipe = "tensorwise" if bad else "rowwise"
config = float8.Float8LinearConfig.from_recipe_name(recipe)
object.__setattr__(config, "emulate", True)
float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: "lm_head" not in name)
data = models.causal(models.pairs(2400, 32))
models.fit(hf.Trainer(model, models.arguments(max_steps=150), train_dataset=data))
