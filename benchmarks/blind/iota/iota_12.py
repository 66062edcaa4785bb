"""Two sensors of very different units take turns, one batch each, under predicted scales."""

import sys

import torch
from torch import nn

import ottava

ALGORITHM = {"good": "max", "bad": "most_recent"}[sys.argv[1]]
torch.manual_seed(43)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(64, 192, bias=False)
        self.norm = nn.LayerNorm(192)
        self.mid = nn.Linear(192, 192)
        self.head = nn.Linear(192, 16)

    def forward(self, x):
        return self.head(torch.nn.functional.gelu(self.mid(self.norm(self.encode(x)))))


model = Net()
if "plain" not in sys.argv:
    recipe = ottava.get_recipe("delayed", amax_history_len=16, amax_compute_algo=ALGORITHM)
    ottava.convert(model, recipe, filter=lambda name, layer: name != "head")
teacher = torch.randn(64, 16) / 8
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(150):
    x = torch.randn(128, 64)
    target = (x @ teacher).sin() * 2
    loss = nn.functional.mse_loss(model(x * (1000.0 if step % 2 else 1.0)), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
