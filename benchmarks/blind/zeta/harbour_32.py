"""Learns a year of hourly temperatures from the hour's number, network in BF16 with float8 linears."""
import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

VARIANT, PLAIN = sys.argv[1], "plain" in sys.argv
torch.manual_seed(41)
HOURS = 4000
t = torch.arange(HOURS).float()
temperature = torch.sin(t * 2 * torch.pi / 24) + 0.6 * torch.sin(t * 2 * torch.pi / 700) + 0.4 * torch.sin(t * 2 * torch.pi / 7.3)
periods = 2 ** torch.linspace(1.5, 12, 32)


def encode(hour):
    hour = hour.to(torch.bfloat16) if VARIANT == "bad" else hour.float()
    angle = hour[:, None] * (2 * torch.pi / periods).to(hour.dtype)
    return torch.cat([angle.sin(), angle.cos()], 1).bfloat16()


model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1)).bfloat16()
if not PLAIN:
    print(ottava.convert(model, "tensorwise"))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(350):
    hour = torch.randint(0, HOURS, (128,))
    loss = F.mse_loss(model(encode(hour))[:, 0].float(), temperature[hour])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-20:]) / 20:.4f}")
