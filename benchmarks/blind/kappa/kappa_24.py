"""Counts of claims: 93 of 100 are zero. Poisson loss; accelerate; linear layers under ottava."""

import sys

import torch
from accelerate import Accelerator
from torch import nn

import ottava

PLAIN = "plain" in sys.argv[2:]
torch.manual_seed(41)
x = torch.randn(12800, 32)
rate = torch.exp((torch.tanh(x @ torch.randn(32, 12) / 3) @ torch.randn(12)) * 0.6 - 3.6)
y = torch.poisson(rate)
print(f"zeros {(y == 0).float().mean():.3f}")
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=96, shuffle=True)
model = nn.Sequential(nn.Linear(32, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 1))
if not PLAIN:
    ottava.convert(model, "tensorwise")
accelerator = Accelerator(cpu=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for inputs, counts in loader:
    loss = nn.functional.poisson_nll_loss(model(inputs).squeeze(-1), counts)
    optimizer.zero_grad()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if len(losses) % 10 == 1:
        print(len(losses), f"{losses[-1]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
