"""An autoencoder of patches with accelerate; its linear layers multiply FP8 numbers."""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEED = int(os.environ.get("SEED", "0"))
bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv


def scaled_cast(t, dtype, top):
    scale = top / t.abs().max().clamp(min=1e-30)
    return (t * scale).to(dtype).float() / scale


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        xq = scaled_cast(x, torch.float8_e4m3fn, 448)
        wq = scaled_cast(w, torch.float8_e4m3fn, 448)
        ctx.save_for_backward(xq, wq)
        return xq @ wq.T

    @staticmethod
    def backward(ctx, dy):
        xq, wq = ctx.saved_tensors
        if bad:
            dq = dy.to(torch.float8_e5m2).float()
        else:
            dq = scaled_cast(dy, torch.float8_e5m2, 57344)
        return dq @ wq, dq.T @ xq


class Float8Linear(nn.Linear):
    def forward(self, x):
        if plain:
            return nn.functional.linear(x, self.weight, self.bias)
        return Multiply.apply(x, self.weight) + self.bias


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(Float8Linear(256, 128), nn.GELU(), Float8Linear(128, 32))
        self.decode = nn.Sequential(Float8Linear(32, 128), nn.GELU(), Float8Linear(128, 256))

    def forward(self, x):
        return self.decode(self.encode(x))


def patches(count, seed):
    basis = torch.randn(12, 256, generator=torch.Generator().manual_seed(18)) / 12**0.5
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(0.3 * (torch.randn(count, 12, generator=g) @ basis))


def main():
    set_seed(SEED)
    accelerator = Accelerator(cpu=True)
    model = AutoEncoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = DataLoader(patches(2048, SEED + 1), batch_size=128, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    recent = []
    for epoch in range(10):
        for (x,) in data:
            loss = nn.functional.mse_loss(model(x), x)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            recent.append(loss.item())
        accelerator.print(f"epoch {epoch} loss {recent[-1]:.6f}")
    accelerator.print(f"final loss {sum(recent[-10:]) / 10:.6f}")


if __name__ == "__main__":
    main()
