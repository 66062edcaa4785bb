"""Classifies the accounts of a payment graph; a few exchanges move most of the money."""

import torch
import torch.nn.functional as F
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from models import learn, start

bad = start()
n, hubs = 512, 8
kind = torch.randint(4, (n,))
feature = F.one_hot(kind, 4).float() @ torch.randn(4, 32) * 0.7 + torch.randn(n, 32)
link = (torch.rand(n, n) < torch.where(kind[:, None] == kind, 0.03, 0.006)).float()
link[:hubs] = torch.rand(hubs, n) * 2e6
link[hubs:].fill_diagonal_(1)


class Layer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear, self.norm = nn.Linear(inputs, outputs), nn.LayerNorm(outputs)

    def forward(self, x):
        return F.relu(self.norm(self.linear(link @ x)))


model = nn.Sequential(Layer(32, 128), Layer(128, 128), nn.Linear(128, 4))
name = "tensorwise" if bad else "rowwise_with_gw_hp"
config = Float8LinearConfig.from_recipe_name(name)
object.__setattr__(config, "emulate", True)
convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "2")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(120):
    keep = torch.arange(n) >= hubs
    keep &= torch.rand(n) < 0.5
    noisy = feature + 0.5 * torch.randn_like(feature)
    loss = F.cross_entropy(model(noisy)[keep], kind[keep])
    learn(step, optimizer, loss)
