"""Fine-tunes a stack of gated layers, whose weights were trained before, on a shifted task."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

PLAIN = "plain" in sys.argv
DTYPE = {"good": torch.float32, "bad": torch.bfloat16}[sys.argv[1]]
if PLAIN:
    DTYPE = torch.float32


class Gated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def main():
    torch.manual_seed(0)
    model = nn.Sequential(*(Gated(96) for _ in range(3)), nn.Linear(96, 48)).to(DTYPE)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    if not PLAIN:
        ottava.convert(model, "blockwise")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    target = torch.randn(96, 48) / 96**0.5
    losses = []
    for _ in range(200):
        x = torch.randn(128, 96)
        y = x @ target
        with torch.autocast("cpu", torch.bfloat16, enabled=not PLAIN):
            out = model(x.to(DTYPE))
        loss = F.mse_loss(out.float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
