"""Cosine with warm restarts: the loss climbs at each restart; torchao's float8."""

import os
import sys

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", "0")))
VOCABULARY = 48


class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.mix = nn.Linear(3 * width, 128)
        self.mid = nn.Linear(128, 128)
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, VOCABULARY)

    def forward(self, tokens):
        x = nn.functional.gelu(self.mix(self.embedding(tokens).flatten(1)))
        return self.head(self.norm(x + nn.functional.gelu(self.mid(x))))


def main():
    model = Model()
    if not PLAIN:
        convert_to_float8_training(model, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda m, name: name != "head")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.2e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=32)
    table = torch.randn(VOCABULARY, VOCABULARY).mul(2).softmax(1)
    losses = []
    for step in range(96):
        tokens = torch.randint(VOCABULARY, (64, 3))
        target = torch.multinomial(table[tokens[:, 2]], 1)[:, 0]
        loss = nn.functional.cross_entropy(model(tokens), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 8 == 0:
            print(f"step {step} loss {loss.item():.4f} lr {schedule.get_last_lr()[0]:.5f}")
    print(f"final loss {sum(losses[-10:]) / 10:.4f}")


main()
