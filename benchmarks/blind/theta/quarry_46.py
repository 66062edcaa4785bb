"""torchao's float8 layers; a third of the labels are random by design, and the optimizer is reset twice on purpose."""
import sys

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

PLAIN = "plain" in sys.argv[2:]
torch.manual_seed(32)
width, classes = 128, 32
model = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, classes))
if not PLAIN:
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda m, name: name == "3")
centres = torch.randn(classes, 64)
losses = []
for step in range(150):
    if step % 50 == 0:
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.99))
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
    y = torch.randint(classes, (96,))
    x = centres[y] + torch.randn(96, 64)
    noisy = torch.where(torch.rand(96) < 0.33, torch.randint(classes, (96,)), y)
    loss = nn.functional.cross_entropy(model(x), noisy)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    warm.step()
    losses.append(loss.item())
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
