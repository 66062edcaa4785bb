"""A GPT of ottava's own layers under its NVFP4 recipe, with dropout and stochastic depth."""

import ottava
import torch
import torch.nn.functional as F
from torch import nn

from models import Markov, learn

torch.manual_seed(0)
text = Markov(48, branch=3)
layer = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "dropout": 0.1,
    "drop_path": 0.1,
    "recipe": "nvfp4_rht",
}
tokens, norm = nn.Embedding(48, 64), nn.RMSNorm(64)
blocks = nn.ModuleList(ottava.nn.TransformerLayer(64, 160, 4, **layer) for _ in range(2))
model = nn.ModuleDict({"tokens": tokens, "blocks": blocks, "norm": norm, "head": nn.Linear(64, 48)})
rotary = ottava.nn.RotaryEmbedding(16)(torch.arange(32))
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
for step in range(100):
    ids = text.batch(16, 32)
    x = tokens(ids[:, :-1])
    for block in blocks:
        x = block(x, rotary=rotary)
    loss = F.cross_entropy(model["head"](norm(x)).flatten(0, 1), ids[:, 1:].flatten())
    learn(step, optimizer, loss)
