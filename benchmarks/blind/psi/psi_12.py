"""A VQ autoencoder for short signals."""
import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
import ottava

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
LENGTH, PARTS, CODES, WIDTH, BATCH, STEPS = 64, 8, 64, 16, 128, 180


class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.codes = nn.Embedding(CODES, WIDTH)
        nn.init.normal_(self.codes.weight, std=0.3)

    def forward(self, z):
        flat = z.reshape(-1, WIDTH)
        index = torch.cdist(flat.detach(), self.codes.weight.detach()).argmin(-1)
        q = self.codes(index).view_as(z)
        loss = (q - z.detach()).square().mean() + 0.25 * (z - q.detach()).square().mean()
        if mode != "bad":
            q = z + (q - z).detach()
        return q, loss, index


class VQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(LENGTH, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, PARTS * WIDTH)
        )
        self.book = Codebook()
        self.decoder = nn.Sequential(
            nn.Linear(PARTS * WIDTH, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, LENGTH)
        )

    def forward(self, x):
        z = self.encoder(x).view(-1, PARTS, WIDTH)
        q, loss, index = self.book(z)
        return self.decoder(q.flatten(1)), loss, index


time = torch.linspace(0, 1, LENGTH)


def batch():
    f = 1 + 3 * torch.rand(BATCH, 2, 1)
    phase = 6.28 * torch.rand(BATCH, 2, 1)
    a = 0.5 + torch.rand(BATCH, 2, 1)
    return (a * torch.sin(6.28 * f * time + phase)).sum(1)


model = VQ()
if not plain:
    ottava.convert(model, "rowwise")
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
losses = []
for step in range(STEPS):
    x = batch()
    y, commit, index = model(x)
    rebuilt = F.mse_loss(y, x)
    loss = rebuilt + commit
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    losses.append(rebuilt.item())
    if step % 40 == 0:
        print(f"step {step} loss {rebuilt.item():.4f} codes in use {len(index.unique())}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
