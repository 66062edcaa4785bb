"""Accumulation by accelerate with token losses: python pi_19.py good|bad [plain]."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ottava

REDUCTION = {"good": "mean", "bad": "sum"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
EPOCHS, MICRO, LENGTH = 4, 4, 4

torch.manual_seed(19)
accelerator = Accelerator(gradient_accumulation_steps=MICRO, cpu=True)
shift = torch.randint(16, (16,))
ids = torch.randint(16, (3840, LENGTH))
targets = (ids + shift[ids.roll(1, dims=1)]) % 16
model = nn.Sequential(
    nn.Embedding(16, 32),
    nn.Flatten(),
    nn.Linear(32 * LENGTH, 256),
    nn.GELU(),
    nn.Linear(256, 256),
    nn.GELU(),
    nn.Linear(256, 16 * LENGTH),
)
if not PLAIN:
    ottava.convert(model, "blockwise", filter=lambda name, layer: name != "6")
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
loader = DataLoader(TensorDataset(ids, targets), batch_size=24, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for _ in range(EPOCHS):
    for x, y in loader:
        with accelerator.accumulate(model):
            logits = model(x).view(-1, 16)
            loss = nn.functional.cross_entropy(logits, y.flatten(), reduction=REDUCTION)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item() / (y.numel() if REDUCTION == "sum" else 1))
print(f"loss {sum(losses[-40:]) / 40:.4f}")
