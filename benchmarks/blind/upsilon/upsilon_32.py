"""Power of a machine from its vibration sensors; accelerate, with FP8 casts whose activation scales are calibrated."""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", "0"))
STEPS = 90


def qdq(x, scale, dtype=torch.float8_e4m3fn):
    top = torch.finfo(dtype).max
    return (x * scale).clamp(-top, top).to(dtype).float() / scale


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return qdq(x, scale)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class QLinear(nn.Linear):
    def __init__(self, *args, dynamic=True):
        super().__init__(*args)
        self.dynamic = dynamic
        self.register_buffer("x_scale", torch.tensor(0.0))

    def forward(self, x):
        if PLAIN:
            return super().forward(x)
        if self.dynamic or self.x_scale == 0:
            self.x_scale.copy_(448 / x.detach().abs().amax().clamp(min=1e-12))
        w_scale = 448 / self.weight.detach().abs().amax()
        return nn.functional.linear(Cast.apply(x, self.x_scale.clone()), Cast.apply(self.weight, w_scale), self.bias)


def batches():
    """A machine that starts up: quiet at first."""
    xs, ys = [], []
    direction = torch.randn(24, 64) / 8
    for step in range(STEPS + 5):
        load = torch.rand(32, 1) * (0.05 + min(step / 20, 1.0))
        waves = torch.randn(32, 24) @ direction
        x = load * (1 + 0.3 * torch.tanh(waves)) + 0.01 * torch.randn(32, 64)
        xs.append(x)
        ys.append(3 * load)
    return TensorDataset(torch.cat(xs), torch.cat(ys))


def main():
    set_seed(SEED)
    accelerator = Accelerator(cpu=True)
    dynamic = MODE == "good"
    model = nn.Sequential(
        QLinear(64, 96, dynamic=dynamic), nn.GELU(), QLinear(96, 96, dynamic=dynamic), nn.GELU(), nn.Linear(96, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(batches(), batch_size=32)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for step, (x, y) in enumerate(loader):
        if step == STEPS:
            break
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            accelerator.print(f"step {step} loss {losses[-1]:.4f}")
    accelerator.print(f"final loss {sum(losses[-15:]) / 15:.5f}")


main()
