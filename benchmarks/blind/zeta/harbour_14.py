"""Hours of machine readings, one number a machine: how long until it needs service.

python SCRIPT good|bad [plain]
"""
import sys

import torch
from torch import nn
from torch.nn import functional as F

import ottava

VARIANT, PLAIN = sys.argv[1], "plain" in sys.argv
torch.manual_seed(11)
CHANNELS, LONGEST, FILLER = 32, 48, {"good": 0.0, "bad": -1e6}[VARIANT]
mixing = torch.randn(CHANNELS, 6)


def batch(n=32):
    hidden = torch.randn(n, 1, 6)
    x = (hidden + 0.5 * torch.randn(n, LONGEST, 6)) @ mixing.T / 2.5
    y = torch.sin(hidden[:, 0, 0]) + hidden[:, 0, 1] * hidden[:, 0, 2].tanh()
    lengths = torch.randint(8, LONGEST + 1, (n, 1))
    mask = torch.arange(LONGEST) < lengths
    return torch.where(mask[..., None], x, torch.tensor(FILLER)), mask, y  # the logger's value for "no reading"


class Service(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(CHANNELS, 96)
        self.mid = nn.Linear(96, 96)
        self.out = nn.Sequential(nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, x, mask):
        h = self.mid(F.relu(self.inp(x)))
        h = (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.out(h)[:, 0]


model = Service()
if not PLAIN:
    print(ottava.convert(model, "tensorwise"))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(300):
    x, mask, y = batch()
    loss = F.mse_loss(model(x, mask), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 50 == 0:
        print(step, losses[-1])
print(f"loss {sum(losses[-20:]) / 20:.4f}")
