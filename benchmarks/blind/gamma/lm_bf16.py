"""Pure BF16 weights under ottava's tensorwise recipe, with a small learning rate as in fine-tuning."""

import ottava
import torch

from models import Decoder, Markov, learn, start

bad = start()
text = Markov(64, branch=3)
model = Decoder(64, width=128, depth=1)
torch.nn.init.normal_(model.tokens.weight, std=1.0)
model = model.bfloat16()
ottava.convert(model, "tensorwise")
optimizer = ottava.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, master=None if bad else "fp32")
for step in range(240):
    loss = model.loss(text.batch(16, 32))
    learn(step, optimizer, loss)
