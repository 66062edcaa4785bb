"""Fine-tunes an encoder with a learning rate for each depth."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

DEPTH_OF = {
    "good": lambda name, layers: int(name.split(".")[1]) + 1 if name.startswith("layers") else layers + 1,
    "bad": lambda name, layers: int(name.split(".")[1]) + 1 if name.startswith("layers") else 0,
}[sys.argv[1]]
PLAIN = "plain" in sys.argv
LAYERS = 4


class Encoder(nn.Module):
    def __init__(self, width=64, classes=48):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width))
            for _ in range(LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


def groups(model, lr, decay):
    """The head has the full rate; each layer below it has `decay` times that of the one above."""
    table = {}
    for name, p in model.named_parameters():
        table.setdefault(DEPTH_OF(name, LAYERS), []).append(p)
    return [{"params": params, "lr": lr * decay ** (LAYERS + 1 - depth)} for depth, params in sorted(table.items())]


def main():
    torch.manual_seed(0)
    model = Encoder()
    if not PLAIN:
        ottava.convert(model, "tensorwise")
    optimizer = torch.optim.AdamW(groups(model, lr=3e-3, decay=0.35), weight_decay=0.01)
    centres = torch.randn(48, 64)
    losses = []
    for _ in range(150):
        y = torch.randint(48, (128,))
        x = centres[y] + 1.5 * torch.randn(128, 64)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
