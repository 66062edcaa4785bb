"""Convolutional classifier with loss scaling and SGD; the dense layers run in FP8."""
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

VARIANT, PLAIN, SEED = sys.argv[1], "plain" in sys.argv, int(os.environ.get("SEED", 0))


class Fp8Dense(nn.Linear):
    class Fn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            sx = x.abs().amax(1, keepdim=True).clamp_min(1e-12) / 448
            sw = w.abs().max() / 448
            xq, wq = (x / sx).to(torch.float8_e4m3fn).to(x.dtype) * sx, (w / sw).to(torch.float8_e4m3fn).to(w.dtype) * sw
            ctx.save_for_backward(xq, wq)
            return xq @ wq.t()

        @staticmethod
        def backward(ctx, dy):
            xq, wq = ctx.saved_tensors
            s = dy.abs().max().clamp_min(1e-30) / 57344
            dyq = (dy / s).to(torch.float8_e5m2).to(dy.dtype) * s
            return dyq @ wq, dyq.t() @ xq

    def forward(self, x):
        return super().forward(x) if PLAIN else self.Fn.apply(x, self.weight) + self.bias


torch.manual_seed(SEED)
model = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
                      Fp8Dense(256, 128), nn.ReLU(), Fp8Dense(128, 64), nn.ReLU(), nn.Linear(64, 10))
pattern = torch.randn(10, 1, 16, 16, generator=torch.Generator().manual_seed(21))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
losses = []
for step in range(90):
    y = torch.randint(10, (64,))
    x = pattern[y] + 1.2 * torch.randn(64, 1, 16, 16)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    if VARIANT == "good":
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    if step % 15 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
