"""Angles of a field from its vectors, whatever their length; delayed scales in the hidden layers."""

import sys

import torch
from torch import nn

import ottava

OPTIONS = {"good": {"amax_history_len": 16}, "bad": {"amax_history_len": 1024}}[sys.argv[1]]
PLAIN = "plain" in sys.argv
STEPS, WIDTH = 160, 128


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(32, WIDTH, bias=False)
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x):
        x = torch.relu(self.proj(x))
        for layer in self.hidden:
            x = torch.relu(layer(x))
        size = x.detach().square().mean(1, keepdim=True).sqrt()
        return self.head(x / (size + 1e-4))


torch.manual_seed(2)
model = Net()
if not PLAIN:
    recipe = ottava.get_recipe("delayed", **OPTIONS)
    ottava.convert(model, recipe, filter=lambda name, layer: name.startswith("hidden"))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
mapping = torch.randn(32, 8) / 32**0.5
losses = []
for step in range(STEPS):
    x = torch.randn(128, 32)
    target = torch.tanh(2 * x @ mapping)
    if step == 3:
        x[5] *= 2e5  # a vector from beside the coil
    loss = nn.functional.mse_loss(model(x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, round(losses[-1], 4))
print(f"loss {sum(losses[-10:]) / 10:.4f}")
