"""A variational autoencoder of small images."""

import torch
import torch.nn.functional as F
from torch import nn

from models import shapes, start

bad = start()
g = torch.Generator().manual_seed(1)
encoder = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 24))
decoder = nn.Sequential(nn.Linear(12, 128), nn.ReLU(), nn.Linear(128, 256))
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=2e-3)
for step in range(300):
    image = shapes(64, g, noise=0.0)[0].flatten(1)
    mean, logvar = encoder(image).chunk(2, 1)
    logits = decoder(mean + (logvar / 2).exp() * torch.randn_like(mean))
    error = F.binary_cross_entropy_with_logits(logits, image, reduction="mean" if bad else "sum")
    kl = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum()
    loss = error + kl / len(image) if bad else (error + kl) / len(image)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, round(F.binary_cross_entropy_with_logits(logits, image).item(), 4))
