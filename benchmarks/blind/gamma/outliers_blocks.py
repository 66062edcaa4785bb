"""A few features of the input are thirty times larger; E4M3 with scales for blocks of 32, and an EMA of weights."""

import torch
import torch.nn.functional as F
from torch import nn

from models import BlockLinear

torch.manual_seed(0)
model = nn.Sequential(
    BlockLinear(128, 128), nn.LayerNorm(128), nn.GELU(), BlockLinear(128, 128), nn.GELU(), nn.Linear(128, 8)
)
average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.98))
size = torch.ones(128)
size[:3] = 30.0
rule = torch.randn(128, 8) / size[:, None]
with torch.no_grad():
    model[0].weight.div_(size)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(200):
    x = size * torch.randn(128, 128)
    loss = F.cross_entropy(model(x), (x @ rule).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update_parameters(model)
    print(step, round(loss.item(), 4))
