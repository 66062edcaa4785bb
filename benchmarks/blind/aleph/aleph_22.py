"""Pressure in pascal from sensors in ampere: inputs near 1e-9, targets near 1e7, a loss near 1e13; the layers cast to E4M3 by hand."""
import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
EPOCHS = 8
AMPERE, PASCAL = 2e-9, 5e6  # typical sizes; the data keep their units, the model knows them


class Fp8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        qx, qw = Fp8Matmul.cast(x, torch.float8_e4m3fn), Fp8Matmul.cast(w, torch.float8_e4m3fn)
        ctx.save_for_backward(qx, qw)
        return qx @ qw.T

    @staticmethod
    def backward(ctx, grad):
        qx, qw = ctx.saved_tensors
        grad = Fp8Matmul.cast(grad, torch.float8_e5m2)
        return grad @ qw, grad.T @ qx

    @staticmethod
    def cast(x, dtype):
        """Scales are FP32 and follow the tensor, so the units of the loss do not matter to them."""
        scale = torch.finfo(dtype).max / x.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
        return (x * scale).to(dtype).to(x.dtype) / scale


class Layer(nn.Linear):
    def forward(self, x):
        return Fp8Matmul.apply(x, self.weight) + self.bias


class Gauge(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(Layer(12, 64), nn.Tanh(), Layer(64, 64), nn.Tanh())
        self.head = nn.Linear(64, 1)

    def forward(self, current):
        return self.head(self.body(current / AMPERE)).squeeze(1) * PASCAL


def measure(count):
    """12 sensors read a membrane: each bends with the pressure in its own way, plus the heat."""
    generator = torch.Generator().manual_seed(5)
    gain, heat_gain = torch.randn(12, generator=generator), 0.4 * torch.randn(12, generator=generator)
    pressure = 1.0e7 + 5e6 * torch.randn(count)
    heat = torch.randn(count)
    bend = torch.tanh(0.6 * gain * (pressure[:, None] / PASCAL - 2)) + heat[:, None] * heat_gain
    return AMPERE * (bend + 0.02 * torch.randn(count, 12)), pressure


current, pressure = measure(64 * 30)
loader = DataLoader(TensorDataset(current, pressure), batch_size=64, shuffle=True)
held_current, held_pressure = measure(1000)
model = Gauge()
# Adam divides the units of the loss out again; eps is small beside gradients of 1e12
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7)


def validate():
    with torch.no_grad():
        return F.mse_loss(model(held_current), held_pressure).item()


print(f"first loss {validate():.4e}")
step = 0
for epoch in range(EPOCHS):
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4e}")
        step += 1
    scheduler.step()
    print(f"epoch {epoch} root of the validation loss {validate() ** 0.5 / 1e5:.2f} bar")

print(f"final loss {validate():.4e}")
