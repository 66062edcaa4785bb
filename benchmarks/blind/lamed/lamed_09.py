"""A denoising autoencoder: a part of the columns is blanked, the network fills them in. Linears in FP8 (ottava)."""
import os
import sys

import torch
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, ROWS, COLUMNS = 200, 128, 2048, 48


def table(rows, loadings):
    hidden = torch.randn(rows, loadings.shape[0])
    return torch.tanh(hidden @ loadings) + 0.1 * torch.randn(rows, COLUMNS)


def blank(x, share=0.2):
    """Blanks cells at random; says which."""
    gone = torch.rand(x.shape) < share
    if MODE == "good":
        x = x.clone()
    x[gone] = 0.0
    return x, gone


class Filler(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2 * COLUMNS, 192), nn.GELU(), nn.Linear(192, 192), nn.GELU(), nn.Linear(192, COLUMNS)
        )

    def forward(self, x, gone):
        return self.net(torch.cat([x, gone.float()], -1))


torch.manual_seed(SEED)
loadings = torch.randn(5, COLUMNS) * 0.7
data, held_out = table(ROWS, loadings), table(512, loadings)
net = Filler()
if not PLAIN:
    ottava.convert(net, "rowwise")
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
step = 0
while step < STEPS:
    for rows in data.split(BATCH):
        target = rows.clone()
        seen, gone = blank(rows)
        loss = (net(seen, gone) - target).square()[gone].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        step += 1

with torch.no_grad():
    target = held_out.clone()
    seen, gone = blank(held_out)
    loss = (net(seen, gone) - target).square()[gone].mean()
print(f"held-out rows\nfinal loss {loss.item():.4f}")
