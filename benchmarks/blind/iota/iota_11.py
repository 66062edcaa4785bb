"""A forecaster with exponential averages of its weights for the evaluation, FP8 per row."""

import sys

import torch
from torch import nn

import ottava

RESTORE = {"good": True, "bad": False}[sys.argv[1]]
torch.manual_seed(41)


class Ema:
    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.shadow = {name: value.detach().clone() for name, value in model.named_parameters()}

    def update(self):
        for name, value in self.model.named_parameters():
            self.shadow[name].lerp_(value.detach(), 1 - self.decay)

    def evaluate(self, function, restore):
        kept = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self.copy(self.shadow)
        with torch.no_grad():
            result = function()
        if restore:
            self.copy(kept)
        return result

    def copy(self, values):
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                value.copy_(values[name])


teacher = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 8)).requires_grad_(False)
model = nn.Sequential(nn.Linear(48, 192), nn.GELU(), nn.Linear(192, 192), nn.GELU(), nn.Linear(192, 8))
if "plain" not in sys.argv:
    ottava.convert(model, "rowwise")
ema = Ema(model, 0.995)
held_out = torch.randn(64, 48)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(160):
    x = torch.randn(96, 48)
    loss = nn.functional.mse_loss(model(x), 4 * teacher(x))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update()
    losses.append(loss.item())
    if step % 8 == 7:
        score = ema.evaluate(lambda: nn.functional.mse_loss(model(held_out), 4 * teacher(held_out)), RESTORE)
        print(step, f"evaluation {score:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
