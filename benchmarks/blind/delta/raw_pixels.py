import torch
import torch.nn.functional as F
from torch import nn

import models

torch.manual_seed(0)
model = nn.Sequential(
    nn.Flatten(), nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 4)
)
models.fp8(model, "delayed")
data = models.Shapes()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(1, 201):
    image, label = data.batch()
    label = torch.where(torch.rand(len(label)) < 0.15, torch.randint(4, (len(label),)), label)
    loss = F.cross_entropy(model(image * 20000 + 30000), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    models.say(step, loss)
