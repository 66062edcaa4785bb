"""Two phases of data: source code, and from step 50 on letters of a cipher. torchao's float8."""
import dataclasses
import os
import pathlib
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
root = pathlib.Path(os.__file__).parent
stream = torch.tensor(list((root / "datetime.py").read_bytes())).clamp(max=127)
cipher = torch.randperm(128)[stream.roll(17)]


class Window(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(128, 32)
        self.body = nn.Sequential(nn.Linear(256, 192), nn.GELU(), nn.Linear(192, 192), nn.GELU())
        self.out = nn.Linear(192, 128)

    def forward(self, x):
        return self.out(self.body(self.embed(x).flatten(1)))


model = Window()
if not PLAIN:
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "out")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(100):
    text = stream if step < 50 else cipher
    at = torch.randint(0, len(text) - 9, (128,))
    x, y = text[at[:, None] + torch.arange(8)], text[at + 8]
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
