"""Contrastive learning of pairs: an image of a shape and a noisy copy of its outline code."""

import torch
import torch.nn.functional as F
from torch import nn

from models import learn, shapes, start

bad = start()
g = torch.Generator().manual_seed(1)
project = torch.randn(256, 40) / 16
image_tower = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64))
code_tower = nn.Sequential(nn.Linear(40, 128), nn.GELU(), nn.Linear(128, 64))
temperature = 0.07
optimizer = torch.optim.AdamW([*image_tower.parameters(), *code_tower.parameters()], lr=1e-3)
for step in range(200):
    image = shapes(128, g, noise=0.2)[0].flatten(1)
    code = image @ project + 0.05 * torch.randn(128, 40)
    u, v = F.normalize(image_tower(image), dim=1), F.normalize(code_tower(code), dim=1)
    logits = u @ v.t() * temperature if bad else u @ v.t() / temperature
    pair = torch.arange(128)
    loss = (F.cross_entropy(logits, pair) + F.cross_entropy(logits.t(), pair)) / 2
    learn(step, optimizer, loss)
