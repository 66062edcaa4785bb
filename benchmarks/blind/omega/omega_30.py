"""Fine-tuning in three stages with accelerate: the head first, then one more layer at a time; ottava's linears."""

import os
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

import ottava

plain = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
torch.set_num_threads(1)

STAGE, BATCH, FEATURES, WIDTH, CLASSES = 50, 128, 40, 96, 7


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        h = F.gelu(self.low(x))
        return self.head(self.dropout(h + F.gelu(self.high(h))))


world = torch.Generator().manual_seed(12)
axes = torch.randn(2, FEATURES, 10, generator=world) / FEATURES**0.5
mix = torch.randn(2, 10, CLASSES, generator=world)


def batch(task):
    x = torch.randn(BATCH, FEATURES)
    return x, (torch.tanh(1.5 * x @ axes[task]) @ mix[task] + 0.1 * torch.randn(BATCH, CLASSES)).argmax(-1)


accelerator = Accelerator(cpu=True)
model = Classifier()
if not plain:
    ottava.convert(model, "tensorwise")
model = accelerator.prepare(model)
losses = []


def stage(name, task, layers, rate):
    for layer in (model.low, model.high, model.head):
        layer.requires_grad_(layer in layers)
    groups = [{"params": layer.parameters(), "lr": rate / (1 + i)} for i, layer in enumerate(layers)]
    optimizer = accelerator.prepare(torch.optim.AdamW(groups))
    for step in range(STAGE):
        x, y = batch(task)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"{name} step {step} loss {losses[-1]:.4f}")


stage("before", 0, [model.head, model.high, model.low], 5e-3)
with torch.no_grad():
    model.head.weight.mul_(0.1)
    model.head.bias.zero_()
stage("head", 1, [model.head], 2e-2)
stage("and high", 1, [model.head, model.high], 1e-2)
stage("all", 1, [model.head, model.high, model.low], 1e-2)
print(f"final loss {sum(losses[-15:]) / 15:.4f}")
