"""Layer-wise learning rates for a stack of encoder blocks with torchao's Float8Linear."""

import logging
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

PREFIX = {"good": "blocks.", "bad": "encoder.layer."}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
logging.getLogger().setLevel(logging.ERROR)


def groups(model, lr, decay, depth):
    """The embedding has the smallest rate and the head the full one."""
    made = {}
    for name, p in model.named_parameters():
        if name.startswith("head"):
            layer = depth + 1
        elif name.startswith(PREFIX):
            layer = int(name[len(PREFIX) :].split(".")[0]) + 1
        else:
            layer = 0
        made.setdefault(layer, {"params": [], "lr": lr * decay ** (depth + 1 - layer)})["params"].append(p)
    return list(made.values())


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, dim=96, depth=4):
        super().__init__()
        self.embed = nn.Linear(48, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 16)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.manual_seed(107)
teacher = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 16))
model = Stack()
if not PLAIN:
    convert_to_float8_training(
        model, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda module, name: "blocks" in name
    )
optimizer = torch.optim.AdamW(groups(model, 3e-3, 0.5, 4), weight_decay=0.01)
PLACES = [round(group["lr"], 6) for group in optimizer.param_groups]
losses = []
for _ in range(150):
    x = 2 * torch.randn(96, 48)
    with torch.no_grad():
        label = (10 * teacher(x)).argmax(-1)
    loss = F.cross_entropy(model(x).float(), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("rates", PLACES)
print(f"loss {sum(losses[-10:]) / 10:.4f}")
