"""A classifier whose linear layers live in E4M3 between two steps."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

MASTER = {"good": "fp32", "bad": "none"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
FP8 = torch.float8_e4m3fn


def through_fp8(w):
    scale = 448 / w.abs().amax(dim=1, keepdim=True).clamp(min=1e-12)
    return (w * scale).to(FP8).to(w.dtype) / scale


class Linear8(nn.Linear):
    def forward(self, x):
        w = self.weight
        if not PLAIN and MASTER == "fp32":
            w = w + (through_fp8(w) - w).detach()
        return F.linear(x, w, self.bias)


@torch.no_grad()
def store(model):
    """Weights go back to their storage format."""
    for module in model.modules():
        if isinstance(module, Linear8):
            module.weight.copy_(through_fp8(module.weight))


torch.manual_seed(2)
centres = torch.randn(20, 48)
mix = torch.randn(48, 48) / 7


def batch(n=128):
    y = torch.randint(0, 20, (n,))
    x = centres[y] + 0.9 * torch.randn(n, 48)
    return torch.tanh(x @ mix), y


model = nn.Sequential(Linear8(48, 128), nn.ReLU(), Linear8(128, 128), nn.ReLU(), Linear8(128, 20))
if not PLAIN and MASTER == "none":
    store(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.0)
losses = []
for step in range(200):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not PLAIN and MASTER == "none":
        store(model)
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, f"{losses[-1]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
