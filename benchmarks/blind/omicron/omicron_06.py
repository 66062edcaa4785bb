"""Two sources of features take turns; an encoder with delayed scaling reconstructs a hidden signal."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

HISTORY = {"good": {"amax_history_len": 16, "amax_compute_algo": "max"},
           "bad": {"amax_history_len": 1, "amax_compute_algo": "most_recent"}}[sys.argv[1]]  # fmt: skip
PLAIN = "plain" in sys.argv[2:]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(128, 192)
        self.norm = nn.LayerNorm(192)
        self.mlp = nn.Sequential(nn.Linear(192, 256), nn.GELU(), nn.Linear(256, 192))
        self.head = nn.Linear(192, 16)

    def forward(self, x):
        x = self.norm(self.stem(x))
        return self.head(x + self.mlp(x))


torch.manual_seed(8)
mixing = torch.randn(16, 128) / 4
model = Encoder()
if not PLAIN:
    ottava.convert(model, ottava.get_recipe("delayed", **HISTORY))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(160):
    signal = torch.randn(128, 16)
    signal = F.normalize(signal, dim=-1) * 4
    unit = 1.0 if step % 2 else 120.0
    features = unit * (signal @ mixing + 0.1 * torch.randn(128, 128))
    loss = F.mse_loss(model(features).float(), signal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
