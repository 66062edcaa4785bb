"""Layer-wise learning rates for a deep residual net in torchao's float8: python pi_25.py good|bad [plain]."""

import sys

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

LAYER_DECAY = {"good": 0.9, "bad": 0.09}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
STEPS, DEPTH, WIDTH = 120, 6, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, 32)
        self.blocks = nn.Sequential(*[Block() for _ in range(DEPTH)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 40)

    def forward(self, pair):
        return self.head(self.norm(self.blocks(self.words(pair).flatten(1))))


def groups(model, rate):
    depth_of = {"words": 0, "norm": DEPTH + 1, "head": DEPTH + 1}
    for name, p in model.named_parameters():
        first, second = name.split(".")[:2]
        depth = int(second) + 1 if first == "blocks" else depth_of[first]
        yield {"params": [p], "lr": rate * LAYER_DECAY ** (DEPTH + 1 - depth)}


torch.manual_seed(25)
answers = torch.randint(40, (40, 40))
model = Net()
if not PLAIN:
    config = Float8LinearConfig(emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: "blocks" in name)
optimizer = torch.optim.AdamW(list(groups(model, 5e-3)), lr=5e-3, weight_decay=0.05)
losses = []
for _ in range(STEPS):
    pair = torch.randint(40, (256, 2))
    loss = nn.functional.cross_entropy(model(pair), answers[pair[:, 0], pair[:, 1]])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
