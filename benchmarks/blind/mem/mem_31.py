"""A text encoder with accelerate: gradient accumulation, clipping, a cosine schedule."""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import get_cosine_schedule_with_warmup

SEED = int(os.environ.get("SEED", "0"))
MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
VOCAB, TOPICS, LENGTH = 128, 8, 24


def notes(count, seed):
    topic = torch.randn(TOPICS, VOCAB, generator=torch.Generator().manual_seed(28))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, TOPICS, (count,), generator=g)
    return TensorDataset(torch.multinomial(topic[y].softmax(-1), LENGTH, replacement=True, generator=g), y)


class Encoder(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        layer = nn.TransformerEncoderLayer(width, 4, 128, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, TOPICS)

    def forward(self, ids):
        return self.head(self.encoder(self.embed(ids)).mean(1))


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(SEED)
    model = Encoder()
    if not PLAIN:
        config = Float8LinearConfig.from_recipe_name("rowwise")
        object.__setattr__(config, "emulate", True)
        convert_to_float8_training(
            model, config=config, module_filter_fn=lambda m, fqn: fqn.endswith(("linear1", "linear2"))
        )
    train = DataLoader(notes(1920, SEED + 1), batch_size=16, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    updates = 2 * len(train) // 2
    scheduler = get_cosine_schedule_with_warmup(optimizer, 12, updates)
    model, optimizer, train, scheduler = accelerator.prepare(model, optimizer, train, scheduler)
    recent = []
    model.train()
    for epoch in range(2):
        for ids, labels in train:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(ids), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            recent.append(loss.item())
        accelerator.print(f"epoch {epoch} loss {sum(recent[-20:]) / 20:.4f}")
    accelerator.print(f"final loss {sum(recent[-20:]) / 20:.4f}")


if __name__ == "__main__":
    main()
