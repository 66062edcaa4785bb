"""accelerate: label smoothing, mixup, and a batch that grows in the middle of the run."""
import sys

import torch
from accelerate import Accelerator
from torch import nn

PLAIN = "plain" in sys.argv[2:]
torch.manual_seed(30)
accelerator = Accelerator(cpu=True)
width, classes = 128, 20
model = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Dropout(0.2), nn.Linear(width, classes))
if not PLAIN:
    import torchao.float8 as float8

    float8.convert_to_float8_training(model, config=float8.Float8LinearConfig(emulate=True), module_filter_fn=lambda m, name: name != "5")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer = accelerator.prepare(model, optimizer)
centres = torch.randn(classes, 64)
losses = []
for step in range(140):
    n = 32 if step < 90 else 128
    y = torch.randint(classes, (n,))
    x = centres[y] + 1.2 * torch.randn(n, 64)
    share = float(torch.distributions.Beta(0.4, 0.4).sample())
    other = torch.randperm(n)
    out = model(share * x + (1 - share) * x[other])
    loss = share * nn.functional.cross_entropy(out, y, label_smoothing=0.1)
    loss = loss + (1 - share) * nn.functional.cross_entropy(out, y[other], label_smoothing=0.1)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    losses.append(loss.item())
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
