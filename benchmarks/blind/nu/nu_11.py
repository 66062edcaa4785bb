"""Contrastive pairs as in CLIP: in-batch negatives, a learned temperature, changing batch sizes; torchao's Float8."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

PLAIN = "plain" in sys.argv[2:]


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32))
        self.text = nn.Sequential(nn.Linear(48, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32))
        self.temperature = nn.Parameter(torch.tensor(2.6))

    def forward(self, image, text):
        a, b = F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1)
        return self.temperature.clamp(max=4.6).exp() * a @ b.T


torch.manual_seed(0)
model = Clip()
if not PLAIN:
    convert_to_float8_training(
        model,
        config=Float8LinearConfig(emulate=True),
        module_filter_fn=lambda module, name: module.in_features == module.out_features,
    )
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
to_image, to_text = torch.randn(8, 64), torch.randn(8, 48)
losses = []
for step in range(150):
    size = (16, 64, 160)[step % 3]
    z = torch.randn(size, 8)
    image, text = z @ to_image + torch.randn(size, 64), z @ to_text + torch.randn(size, 48)
    logits = model(image, text)
    target = torch.arange(size)
    loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-12:]) / 12:.4f}")
