"""A language model on tokens that are stored compactly; torchao's row-wise FP8."""

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from models import Decoder, Markov, learn, start

bad = start()
vocab = 320
corpus = Markov(vocab, branch=3, seed=3).batch(2000, 32)
corpus = corpus.to(torch.uint8 if bad else torch.int16)
model = Decoder(vocab, width=64, depth=1)
config = Float8LinearConfig.from_recipe_name("rowwise")
object.__setattr__(config, "emulate", True)
convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "head")
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
for step in range(150):
    ids = corpus[torch.randint(2000, (24,))].long()
    loss = model.loss(ids)
    learn(step, optimizer, loss)
