"""PEFT on a small encoder with a new classification head."""

import sys

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn

import ottava

SAVE = {"good": ["classifier"], "bad": None}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]

torch.manual_seed(18)
WIDTH, CLASSES = 96, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.classifier = nn.Linear(WIDTH, CLASSES)
        nn.init.normal_(self.classifier.weight, std=0.02)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x):
        return self.classifier(self.norm(self.blocks(x)))


centres = torch.randn(CLASSES, WIDTH)


def batch(n=96):
    y = torch.randint(0, CLASSES, (n,))
    return centres[y] + 1.5 * torch.randn(n, WIDTH), y


base = Classifier()
if not PLAIN:
    ottava.convert(base, "tensorwise", filter=lambda name, layer: "classifier" not in name)
model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=["up", "down"], modules_to_save=SAVE))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
losses = []
for step in range(120):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, f"{losses[-1]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
