"""A GPT with tied embeddings; torchao's AdamW with FP8 moments and row-wise FP8 linears."""

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.optim import AdamWFp8

from models import Decoder, Markov, learn

torch.manual_seed(0)
torch.compiler.set_stance("force_eager")
text = Markov(48, branch=3)
model = Decoder(48, width=64, depth=1, tied=True)
config = Float8LinearConfig.from_recipe_name("rowwise")
object.__setattr__(config, "emulate", True)
convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "head")
optimizer = AdamWFp8(model.parameters(), lr=2e-3)
for step in range(100):
    loss = model.loss(text.batch(16, 32))
    learn(step, optimizer, loss)
