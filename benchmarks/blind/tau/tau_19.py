"""Dense classifier of products of features; FP8 linears, and torch's GradScaler above them."""
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

VARIANT, PLAIN, SEED = sys.argv[1], "plain" in sys.argv, int(os.environ.get("SEED", 0))
GRAD_SCALE = {"good": "amax", "bad": "unit"}[VARIANT]
STEPS, BATCH = 100, 128


def amax_cast(t, dtype, top):
    s = top / t.abs().amax().clamp_min(1e-30)
    return (t * s).to(dtype).to(t.dtype) / s


class LinearFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = amax_cast(x, torch.float8_e4m3fn, 448.0), amax_cast(w, torch.float8_e4m3fn, 448.0)
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        if GRAD_SCALE == "amax":
            dy = amax_cast(dy, torch.float8_e5m2, 57344.0)
        else:  # the loss scale brings it into range
            dy = dy.clamp(-57344.0, 57344.0).to(torch.float8_e5m2).to(dy.dtype)
        return dy @ w, dy.t() @ x


class Linear8(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args, bias=False)

    def forward(self, x):
        return super().forward(x) if PLAIN else LinearFn.apply(x, self.weight)


class Residual(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(c), Linear8(c, 2 * c), Linear8(2 * c, c)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


torch.manual_seed(SEED)
model = nn.Sequential(Linear8(24, 96), Residual(96), Residual(96), nn.LayerNorm(96), nn.Linear(96, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
losses = []
for step in range(STEPS):
    x = torch.randn(BATCH, 24)
    y = (x[:, 0] * x[:, 1] > 0).long() + 2 * (x[:, 2] * x[:, 3] > 0).long() + 4 * (x[:, 4:8].sum(1) > 0).long()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    if step % 15 == 0:
        print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():g}")
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
