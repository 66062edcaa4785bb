"""accelerate with gradient accumulation over four micro-batches and a linear schedule."""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

import ottava

PREPARE_SCHEDULER = {"good": True, "bad": False}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
STEPS, MICRO = 100, 4

torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=MICRO, cpu=True)
model = nn.Sequential(
    nn.Embedding(128, 32),
    nn.Flatten(),
    nn.Linear(96, 256),
    nn.GELU(),
    nn.Linear(256, 256),
    nn.GELU(),
    nn.Linear(256, 128),
)
if not PLAIN:
    ottava.convert(model, "tensorwise")
table = torch.randint(0, 128, (128,))
inputs = torch.randint(0, 128, (32 * MICRO * STEPS, 3))
data = torch.utils.data.TensorDataset(inputs, table[inputs[:, 1]])
loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=STEPS)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if PREPARE_SCHEDULER:
    scheduler = accelerator.prepare(scheduler)
losses, micro = [], []
for x, y in loader:
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    micro.append(loss.item())
    if accelerator.sync_gradients:
        losses.append(sum(micro) / len(micro))
        micro = []
print(f"loss {sum(losses[-10:]) / 10:.4f}")
