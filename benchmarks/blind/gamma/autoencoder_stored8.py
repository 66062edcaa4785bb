"""An autoencoder whose weights live in E4M3, with one scale a row and no master copy."""

import torch
import torch.nn.functional as F
from torch import nn

from models import shapes, start, to8, to8_stochastic

bad = start()
rounding = to8 if bad else to8_stochastic
g = torch.Generator().manual_seed(1)
model = nn.Sequential(
    nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 48), nn.Linear(48, 256), nn.GELU(), nn.Linear(256, 256)
)
scales = {p: 224 / p.detach().abs().amax(1, keepdim=True) for p in model.parameters() if p.ndim == 2}
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
for step in range(300):
    image = shapes(128, g, noise=0.1)[0].flatten(1)
    loss = F.mse_loss(model(image), image)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for p, scale in scales.items():
            p.copy_(rounding(p * scale) / scale)
    print(step, round(loss.item(), 5))
