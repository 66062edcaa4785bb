"""Sentiment of short messages: bag of embeddings through a deep gate-free stack, float8 linears by torchao."""
import dataclasses
import sys

import torch
from torch import nn
from torch.nn import functional as F

VARIANT, PLAIN = sys.argv[1], "plain" in sys.argv
torch.manual_seed(5)
WORDS, LONGEST, WIDTH = 400, 24, 64
tone = torch.randn(WORDS)


def batch(n=48):
    tokens = torch.randint(1, WORDS, (n, LONGEST))
    length = torch.randint(4, LONGEST + 1, (n, 1))
    tokens[torch.arange(LONGEST) >= length] = 0
    score = (tone[tokens] * (tokens != 0)).sum(1) / length[:, 0].sqrt()
    return tokens, torch.bucketize(score, torch.tensor([-0.7, 0.0, 0.7]))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, eps=1e-12) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, tokens):
        h = self.words(tokens)
        for layer, norm in zip(self.layers, self.norms):
            h = F.silu(norm(layer(h)))
        return self.head(h.mean(1) * 4)


model = Stack()
if not PLAIN:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = {"good": "rowwise_with_gw_hp", "bad": "tensorwise"}[VARIANT]
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "head")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(250):
    tokens, label = batch()
    loss = F.cross_entropy(model(tokens), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-20:]) / 20:.4f}")
