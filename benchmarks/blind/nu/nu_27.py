"""Two sources of data take turns, and their values have different sizes; delayed scaling."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

HISTORY = {"good": 16, "bad": 1}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]

torch.manual_seed(0)
body = nn.Sequential(nn.Linear(64, 192), nn.ReLU(), nn.Linear(192, 192), nn.ReLU())
heads = nn.ModuleList([nn.Linear(192, 16), nn.Linear(192, 16)])
model = nn.ModuleList([body, heads])
if not PLAIN:
    ottava.convert(body, ottava.get_recipe("delayed", amax_history_len=HISTORY))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
teachers = torch.randn(2, 64, 16)
offset = torch.randn(64)
losses, turn = [], 0
for step in range(200):
    source = step % 2
    x = torch.randn(128, 64)
    y = (x @ teachers[source] + x.square() @ teachers[1 - source] * 0.3).argmax(1)
    inputs = x if source == 0 else x * 40
    features = body(inputs)
    logits = heads[source](features if source == 0 else features / 40)
    loss = F.cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
