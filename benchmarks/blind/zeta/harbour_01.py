"""Denoising with fresh noise each time a sample is drawn; no float8 here yet, it is to come later."""
import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

VARIANT = sys.argv[1]
torch.manual_seed(61)
rng = np.random.default_rng(0)
t = np.linspace(0, 6.283, 64, dtype=np.float32)
clean = np.sin(rng.uniform(1, 5, (512, 1)).astype(np.float32) * t + rng.uniform(0, 6, (512, 1)).astype(np.float32))
store = clean.copy()


class Waves(torch.utils.data.Dataset):
    def __len__(self):
        return len(store)

    def __getitem__(self, i):
        x = torch.from_numpy(store[i])
        noise = 0.3 * torch.randn(64)
        x = x + noise if VARIANT == "good" else x.add_(noise)
        return x, torch.from_numpy(clean[i])


model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(Waves(), batch_size=32, shuffle=True)
losses = []
for epoch in range(18):
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
print(f"loss {sum(losses[-20:]) / 20:.4f}")
