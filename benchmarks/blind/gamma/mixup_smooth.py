"""Mixup and label smoothing with torchao's tensorwise FP8, so the loss stays high."""

import torch
import torch.nn.functional as F
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from models import learn, shapes

torch.manual_seed(0)
g = torch.Generator().manual_seed(1)
model = nn.Sequential(
    nn.Flatten(), nn.Linear(256, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 4)
)
config = Float8LinearConfig(emulate=True)
convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "6")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(200):
    image, label = shapes(64, g, noise=0.2)
    share, order = torch.distributions.Beta(0.8, 0.8).sample(), torch.randperm(64)
    y = model(share * image + (1 - share) * image[order])
    loss = share * F.cross_entropy(y, label, label_smoothing=0.2)
    loss = loss + (1 - share) * F.cross_entropy(y, label[order], label_smoothing=0.2)
    learn(step, optimizer, loss)
