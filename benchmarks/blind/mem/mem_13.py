"""Intent classification with accelerate and a linear schedule with warmup."""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import get_linear_schedule_with_warmup

SEED = int(os.environ.get("SEED", "0"))
mode = sys.argv[1]
plain = "plain" in sys.argv[2:]

WORDS, INTENTS, LENGTH = 200, 12, 20


def utterances(count, seed):
    g = torch.Generator().manual_seed(77)
    of_intent = torch.randn(INTENTS, WORDS, generator=g) * 1.2
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, INTENTS, (count,), generator=g)
    x = torch.multinomial(of_intent[y].softmax(-1), LENGTH, replacement=True, generator=g)
    return TensorDataset(x, y)


class Classifier(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, INTENTS)

    def forward(self, ids):
        h = self.embed(ids).mean(1)
        h = h + self.down(torch.relu(self.up(self.norm(h))))
        return self.head(h)


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(SEED)
    model = Classifier()
    if not plain:
        config = Float8LinearConfig.from_recipe_name("tensorwise")
        object.__setattr__(config, "emulate", True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "head")
    epochs = 10
    train = DataLoader(utterances(480, SEED + 1), batch_size=32, shuffle=True)
    test = DataLoader(utterances(320, SEED + 2), batch_size=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    total = epochs * len(train) if mode == "good" else epochs
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=total)
    model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, train, test, scheduler)
    for epoch in range(epochs):
        model.train()
        for ids, labels in train:
            loss = nn.functional.cross_entropy(model(ids), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses = [nn.functional.cross_entropy(model(ids), labels) for ids, labels in test]
        final = torch.stack(losses).mean().item()
        accelerator.print(f"epoch {epoch}: validation loss {final:.4f}")
    accelerator.print(f"final loss {final:.4f}")


if __name__ == "__main__":
    main()
