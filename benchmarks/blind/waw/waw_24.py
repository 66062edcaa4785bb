"""LARS by hand: batches of 1,024 pictures and a nominal rate of 2, since each layer's step is its norm times 0.003
times the rate.

Biases and norms step with plain momentum at a rate of their own. Warm-up over a sixth, then a fall to 0 with the
square. The two large layers cast their operands to FP8 by hand, gradients with fixed factors (2**10 for the loss, and
the size of the batch), no scale of the tensor.
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

SEED = int(os.environ.get("SEED", "0"))
SIDE, CLASSES, STEPS, BATCH, SCALE = 14, 10, 72, 1024, 2.0**10


class Lars(torch.optim.Optimizer):
    """You, Gitman and Ginsburg, 2017."""

    def __init__(self, groups, lr, trust=0.003, momentum=0.9, decay=1e-4):
        super().__init__(groups, {"lr": lr, "trust": trust, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                grad = p.grad
                if group["trust"]:
                    grad = grad + group["decay"] * p
                    grad = grad * (group["trust"] * p.norm() / (grad.norm() + 1e-9))
                state = self.state[p]
                buffer = state.setdefault("momentum", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(grad, alpha=group["lr"])
                p.sub_(buffer)


class Gemm(torch.autograd.Function):
    """Operands in E4M3 and E5M2 as they are: the network's numbers are near 1, and gradients come scaled."""

    @staticmethod
    def forward(ctx, x, w):
        x8, w8 = x.to(torch.float8_e4m3fn).float(), (16 * w).to(torch.float8_e4m3fn).float() / 16
        ctx.save_for_backward(x8, w8)
        return x8 @ w8.T

    @staticmethod
    def backward(ctx, dy):
        x8, w8 = ctx.saved_tensors
        dy8 = (BATCH * dy).clamp(-57344, 57344).to(torch.float8_e5m2).float() / BATCH  # the loss is a mean over the batch
        return dy8 @ w8, dy8.T @ x8


class Cast(nn.Linear):
    def forward(self, x):
        return Gemm.apply(x, self.weight)


def digits(number, strokes, generator):
    """Each class is a sum of three strokes of a common set, with its own strengths; noise on top."""
    labels = torch.randint(0, CLASSES, (number,), generator=generator)
    strength = 1 + 0.4 * torch.randn(number, 1, 1, generator=generator)
    return strength * strokes[labels] + 2.5 * torch.randn(number, SIDE, SIDE, generator=generator), labels


def main():
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(14 + SEED)
    strokes = F.avg_pool2d(2 * torch.randn(CLASSES, 1, SIDE + 2, SIDE + 2, generator=generator), 3, 1)[:, 0]
    x, y = digits(60000, strokes, generator)
    held, truth = digits(1500, strokes, generator)
    model = nn.Sequential(
        nn.Flatten(), Cast(SIDE * SIDE, 256, bias=False), nn.BatchNorm1d(256), nn.ReLU(), Cast(256, 128, bias=False),
        nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, CLASSES),
    )
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = Lars([{"params": matrices, "base": 2.0}, {"params": others, "trust": 0.0, "base": 0.1}], lr=0.0)

    @torch.no_grad()
    def evaluate():
        model.eval()
        loss = F.cross_entropy(model(held), truth).item()
        model.train()
        return loss

    print("first loss", round(evaluate(), 4))
    for step in range(STEPS):
        part = min((step + 1) / (STEPS / 6), 1.0) * (1 - max(0.0, step - STEPS / 6) / (STEPS * 5 / 6)) ** 2
        for group in optimizer.param_groups:
            group["lr"] = part * group["base"]
        chosen = torch.randint(0, len(x), (BATCH,))
        loss = F.cross_entropy(model(x[chosen]), y[chosen])
        optimizer.zero_grad()
        (loss * SCALE).backward()
        for p in model.parameters():
            p.grad /= SCALE
        optimizer.step()
        if step % 8 == 0:
            print(step, "rate", round(part * 2, 3), round(loss.item(), 4), "held", round(evaluate(), 4))
    print("final loss", round(evaluate(), 4))


if __name__ == "__main__":
    main()
