"""Weights that live in eight bits, E4M3 codes with one scale a matrix."""

import sys

import torch
from torch import nn

OPTIONS = {"good": {"master": True}, "bad": {"master": False}}[sys.argv[1]]
PLAIN = "plain" in sys.argv
STEPS, WIDTH = 160, 128


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class EightBitStore:
    """Keeps matrices as numbers that E4M3 has; `open` and `close` stand around an optimizer's step."""

    def __init__(self, weights, master=True):
        self.weights = weights
        self.masters = [weight.detach().clone() for weight in weights] if master else None
        self.close()

    @torch.no_grad()
    def open(self):
        if self.masters and not PLAIN:
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.copy_(master)

    @torch.no_grad()
    def close(self):
        if PLAIN:
            return
        for number, weight in enumerate(self.weights):
            if self.masters:
                self.masters[number].copy_(weight)
            scale = 448.0 / weight.abs().amax()
            weight.copy_((weight * scale).to(torch.float8_e4m3fn).float() / scale)


torch.manual_seed(24)
model = nn.Sequential(nn.Linear(64, WIDTH), Residual(), Residual(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32))
centres = torch.randn(32, 64) @ torch.randn(64, 64) / 8
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4)
store = EightBitStore([p for p in model.parameters() if p.ndim == 2], **OPTIONS)
losses = []
for step in range(STEPS):
    labels = torch.randint(0, 32, (128,))
    x = torch.sign(torch.randn(128, 1)) * centres[labels] + 1.5 * torch.randn(128, 64)
    loss = nn.functional.cross_entropy(model(x), labels)
    optimizer.zero_grad()
    loss.backward()
    store.open()
    optimizer.step()
    store.close()
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, round(losses[-1], 4))
print(f"loss {sum(losses[-10:]) / 10:.4f}")
