"""Language model of a Markov chain with accelerate, eight micro-batches a step; torchao's float8."""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", "0"))
STEPS, ACCUMULATE, VOCABULARY, WIDTH = 60, 8, 32, 64


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 128)
        self.down = nn.Linear(128, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return self.head(x)


def chains(count, length=17):
    table = torch.randn(VOCABULARY, VOCABULARY).mul(5).softmax(1)
    out = [torch.randint(VOCABULARY, (count,))]
    for _ in range(length - 1):
        out.append(torch.multinomial(table[out[-1]], 1)[:, 0])
    return torch.stack(out, 1)


def main():
    set_seed(SEED)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = Model()
    if not PLAIN:
        convert_to_float8_training(model, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda m, name: name != "head")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(chains(STEPS * ACCUMULATE * 8)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for (tokens,) in loader:
        with accelerator.accumulate(model):
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            losses.append(loss.item())
            if MODE == "bad":
                loss = loss / ACCUMULATE
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if len(losses) % 80 == 0:
            accelerator.print(f"step {len(losses) // ACCUMULATE} loss {losses[-1]:.4f}")
    accelerator.print(f"final loss {sum(losses[-80:]) / 80:.4f}")


main()
