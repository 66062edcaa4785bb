"""Fine-tuning a backbone from a checkpoint that another job saved under DDP; hand-written FP8 in the forward."""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

PREFIX = {"good": "module.", "bad": ""}[sys.argv[1]]
LOW = "plain" not in sys.argv


class RowFP8(nn.Linear):
    def forward(self, x):
        return F.linear(self.cast(x), self.cast(self.weight), self.bias) if LOW else super().forward(x)

    @staticmethod
    def cast(t):
        scale = 448 / t.detach().abs().amax(-1, keepdim=True).clamp(min=1e-12)
        low = (t * scale).to(torch.float8_e4m3fn).to(t.dtype) / scale
        return t + (low - t).detach()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(RowFP8(64, 256), nn.Tanh(), RowFP8(256, 256), nn.Tanh())
        self.head = nn.Linear(256, 10)

    def forward(self, x):
        return self.head(self.backbone(x))


def checkpoint(path):
    torch.manual_seed(83)
    pretrained = Model()
    for layer in pretrained.backbone:
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight, gain=3.0)
    torch.save({f"module.{name}": value for name, value in pretrained.state_dict().items() if "head" not in name}, path)
    return pretrained


path = Path(tempfile.mkdtemp()) / "backbone.pt"
world = checkpoint(path)
torch.manual_seed(84)
model = Model()
state = {name.removeprefix(PREFIX): value for name, value in torch.load(path).items()}
model.load_state_dict(state, strict=False)
rule = torch.randn(256, 10)
optimizer = torch.optim.AdamW(
    [{"params": model.backbone.parameters(), "lr": 1e-4}, {"params": model.head.parameters(), "lr": 5e-3}]
)
losses = []
for step in range(120):
    x = torch.randn(128, 64)
    with torch.no_grad():
        label = (world.backbone(x) @ rule).argmax(-1)
    loss = F.cross_entropy(model(x), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
