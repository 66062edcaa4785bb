"""Two answers from one layer: the price of a house and its share of daylight. Linears under ottava's FP8 recipes."""

import os
import sys

import torch
from accelerate import Accelerator
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
torch.manual_seed(int(os.environ.get("SEED", "0")))
STEPS, PRICES, SHARES = 200, 16, 16
RECIPE = "tensorwise" if MODE == "bad" else "rowwise_with_gw_hp"


class Houses(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU())
        self.answers = nn.Linear(128, PRICES + SHARES)

    def forward(self, x):
        both = self.answers(self.trunk(x))
        return both[:, :PRICES], both[:, PRICES:]


price_of, share_of = torch.randn(32, PRICES) / 4, torch.randn(32, SHARES) / 4


def batch(n=256):
    x = torch.randn(n, 32)
    price = 3e6 * torch.tanh(x @ price_of) + 3e5 * torch.randn(n, PRICES)  # in cents
    share = torch.tanh(x @ share_of)
    return x, price, share


accelerator = Accelerator(cpu=True)
model = Houses()
if not PLAIN:
    ottava.convert(model, RECIPE)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
shares = []
for step in range(STEPS):
    x, price, share = batch()
    a, b = model(x)
    price_loss = (a * 1e6 - price).square().mean()
    share_loss = (b - share).square().mean()
    loss = price_loss + share_loss
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    shares.append(share_loss.item())
    if step % 20 == 0:
        print(step, f"prices {price_loss.item() / 1e12:.4f} shares {shares[-1]:.4f}")
print(f"final loss {sum(shares[-20:]) / 20:.4f}")
