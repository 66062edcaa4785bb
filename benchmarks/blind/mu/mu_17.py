"""accelerate with gradient accumulation and a linear schedule."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ottava

PREPARED = {
    "good": ("model", "optimizer", "loader", "scheduler"),
    "bad": ("model", "optimizer", "loader"),
}[sys.argv[1]]
PLAIN = "plain" in sys.argv
UPDATES, ACCUMULATE, WARMUP = 70, 6, 5

torch.manual_seed(17)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
x = torch.randn(UPDATES * ACCUMULATE * 24, 40)
truth = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 10)).requires_grad_(False)
y = (truth(x) * 8).argmax(1)
model = nn.Sequential(nn.Linear(40, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))
if not PLAIN:
    ottava.convert(model, "rowwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
parts = {
    "model": model,
    "optimizer": optimizer,
    "loader": DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True),
    "scheduler": torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min((done + 1) / WARMUP, max(0.0, (UPDATES - done) / (UPDATES - WARMUP)))
    ),
}
for name in PREPARED:
    parts[name] = accelerator.prepare(parts[name])
model, optimizer, loader, scheduler = parts.values()

losses = []
for step, (inputs, labels) in enumerate(loader):
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    losses.append(loss.item())
    if step % 60 == 0:
        print(step, round(losses[-1], 4), scheduler.get_last_lr())
print(f"loss {sum(losses[-60:]) / 60:.4f}")
