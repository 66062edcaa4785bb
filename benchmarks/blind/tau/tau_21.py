"""Keyword classifier on feature frames under accelerate; the FP8 scale of a step comes from the step before."""
import os
import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VARIANT, PLAIN, SEED = sys.argv[1], "plain" in sys.argv, int(os.environ.get("SEED", 0))
SATURATE = VARIANT == "good"


def to_e4m3(t, scale):
    t = t * scale
    if SATURATE:
        t = t.clamp(-448.0, 448.0)
    # as the kernel's conversion: e4m3fn has no inf
    return torch.where(t.abs() > 464.0, torch.nan, t).to(torch.float8_e4m3fn)


class ScaledLinear(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("x_amax", torch.tensor(0.0))

    def forward(self, x):
        if PLAIN:
            return super().forward(x)
        amax = x.detach().abs().max()
        used = self.x_amax if self.x_amax > 0 else amax
        x_scale, w_scale = 448.0 / (1.5 * used), 448.0 / self.weight.detach().abs().max()
        xq = to_e4m3(x.detach(), x_scale).to(x.dtype) / x_scale
        wq = to_e4m3(self.weight.detach(), w_scale * 0.999).to(x.dtype) / (w_scale * 0.999)
        if self.training:
            self.x_amax.copy_(amax)
        x = x + (xq - x).detach()  # straight through
        return F.linear(x, self.weight + (wq - self.weight).detach(), self.bias)


torch.manual_seed(SEED)
net = nn.Sequential(ScaledLinear(40, 128), nn.ReLU(), ScaledLinear(128, 128), nn.ReLU(), ScaledLinear(128, 128), nn.ReLU(), nn.Linear(128, 10))
proto = torch.randn(10, 40, generator=torch.Generator().manual_seed(11))
y = torch.randint(10, (90 * 64,))
x = proto[y] + 1.3 * torch.randn(len(y), 40)
x[64 * 57 + 5] *= 4.0  # a loud recording
loader = DataLoader(TensorDataset(x, y), batch_size=64)
accelerator = Accelerator(cpu=True)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
losses = []
for step, (frames, words) in enumerate(loader):
    loss = F.cross_entropy(net(frames), words)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if step % 10 == 0:
        accelerator.print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
