"""Two kinds of sensors send batches in turn, in their own units; ottava's delayed scaling."""

import ottava
import torch
import torch.nn.functional as F
from torch import nn

from models import learn, start

bad = start()
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 32))
history = {"amax_history_len": 1, "amax_compute_algo": "most_recent"} if bad else {"amax_history_len": 16}
ottava.convert(model, ottava.get_recipe("delayed", **history))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
mixing = torch.randn(64, 32) / 8
for step in range(300):
    unit = 100.0 if step % 4 == 3 else 1.0
    x = unit * torch.randn(128, 64)
    y = torch.relu(x) @ mixing
    loss = F.mse_loss(model(x), y) / unit**2
    learn(step, optimizer, loss)
