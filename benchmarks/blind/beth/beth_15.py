"""A lottery ticket under accelerate: train, drop the 70 % smallest weights, go back to step 20, train what is left.

Weights and optimizer go back to the saved state, so the loss jumps to where it was at step 20. Dropped weights stay
exactly 0. Linears are cast to E4M3 by hand, one scale for a row.
"""

import os
import tempfile

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SEED = int(os.environ.get("SEED", "0"))
INPUT, WIDTH, CLASSES, REWIND, STEPS, DROP = 48, 160, 12, 20, 120, 0.7


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    @staticmethod
    def backward(ctx, grad):
        return grad


class Linear8(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("mask", torch.ones_like(self.weight))

    def forward(self, x):
        return F.linear(Cast.apply(x), Cast.apply(self.weight * self.mask), self.bias)


def forever(loader):
    while True:
        yield from loader


def train(accelerator, model, optimizer, batches, steps: int) -> None:
    for step in range(steps):
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            accelerator.print(f"{step:4d}  {loss.item():.4f}")


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(SEED)
    x = torch.randn(3000, INPUT, generator=g)
    hidden = torch.relu(x @ torch.randn(INPUT, 10, generator=g) / INPUT**0.5)
    y = (hidden @ torch.randn(10, CLASSES, generator=g)).argmax(1)

    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(
        Linear8(INPUT, WIDTH), nn.ReLU(), Linear8(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(x[:2500], y[:2500]), batch_size=64, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = forever(loader)

    @torch.no_grad()
    def held() -> float:
        return F.cross_entropy(model(x[2500:]), y[2500:]).item()

    print(f"first loss {held():.4f}")
    with tempfile.TemporaryDirectory() as folder:
        train(accelerator, model, optimizer, batches, REWIND)
        accelerator.save_state(folder)
        train(accelerator, model, optimizer, batches, STEPS - REWIND)
        print(f"dense: {held():.4f}")

        layers = [m for m in accelerator.unwrap_model(model).modules() if isinstance(m, Linear8)]
        sizes = torch.cat([layer.weight.detach().abs().flatten() for layer in layers])
        level = sizes.kthvalue(int(DROP * sizes.numel())).values
        masks = [(layer.weight.detach().abs() > level).float() for layer in layers]
        accelerator.load_state(folder)
        for layer, mask in zip(layers, masks):
            layer.mask.copy_(mask)
        print(f"rewound, sparse: {held():.4f}")
        train(accelerator, model, optimizer, batches, STEPS)
    print(f"final loss {held():.4f}")


if __name__ == "__main__":
    main()
