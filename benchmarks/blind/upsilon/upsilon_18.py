"""Pictures of ten kinds with accelerate, one pass; linears cast by hand."""

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
CLASSES, STEPS, BATCH = 10, 80, 32


def fp8(t, dtype):
    scale = torch.finfo(dtype).max / t.abs().amax().clamp(min=1e-20)
    return (t * scale).to(dtype).to(t.dtype) / scale


class Gemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = fp8(x, torch.float8_e4m3fn), fp8(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = fp8(dy, torch.float8_e5m2)
        return dy @ w, dy.t() @ x


class Linear8(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else Gemm.apply(x, self.weight) + self.bias


def pictures(count, means):
    labels = torch.arange(count) * CLASSES // count  # a folder for each kind
    return TensorDataset(means[labels] + 1.5 * torch.randn(count, 64), labels)


def main():
    set_seed(SEED)
    accelerator = Accelerator(cpu=True)
    means = torch.randn(CLASSES, 64)
    train, test = pictures(STEPS * BATCH, means), pictures(500, means)
    model = nn.Sequential(Linear8(64, 128), nn.ReLU(), Linear8(128, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(train, batch_size=BATCH, shuffle=MODE == "good")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if step % 10 == 0:
            accelerator.print(f"step {step} loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        x, y = test.tensors
        accelerator.print(f"final loss {nn.functional.cross_entropy(model(x), y).item():.4f}")


main()
