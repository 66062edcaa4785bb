"""Contrastive pairs with a learned temperature: python pi_35.py good|bad [plain]."""

import math
import sys

import torch
from torch import nn

import ottava

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
STEPS, BATCH = 120, 64


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64))
        self.text = nn.Sequential(nn.Linear(48, 128), nn.GELU(), nn.Linear(128, 64))
        self.temperature = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image, text):
        one = nn.functional.normalize(self.image(image), dim=-1)
        two = nn.functional.normalize(self.text(text), dim=-1)
        return self.temperature.exp().clamp(max=100) * one @ two.T


torch.manual_seed(35)
model = CLIP()
if not PLAIN:
    ottava.convert(model, "tensorwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.1)
to_image, to_text = torch.randn(16, 64) / 4, torch.randn(16, 48) / 4
losses = []
for _ in range(STEPS):
    thing = torch.randn(BATCH, 16)
    if torch.rand(()) < 0.2:
        thing = thing[torch.randint(BATCH // 2, (BATCH,))] + 0.3 * torch.randn(BATCH, 16)
    image = torch.tanh(thing @ to_image) + 0.3 * torch.randn(BATCH, 64)
    text = torch.tanh(thing @ to_text) + 0.3 * torch.randn(BATCH, 48)
    scores, target = model(image, text), torch.arange(BATCH)
    loss = (nn.functional.cross_entropy(scores, target) + nn.functional.cross_entropy(scores.T, target)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
