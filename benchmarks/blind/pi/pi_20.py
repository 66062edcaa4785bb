"""Image classifier with a loss scaler and clipping: python pi_20.py good|bad [plain]."""

import sys

import torch
from torch import nn

UNSCALE_FIRST = {"good": True, "bad": False}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
STEPS = 120


class ToE4M3(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim):
        amax = x.abs().amax(dim=dim, keepdim=True).clamp(min=1e-12)
        return (x * (448 / amax)).to(torch.float8_e4m3fn).to(x.dtype) * (amax / 448)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Linear(nn.Linear):
    def forward(self, x):
        if PLAIN:
            return super().forward(x)
        return nn.functional.linear(ToE4M3.apply(x, -1), ToE4M3.apply(self.weight, -1), self.bias)


torch.manual_seed(20)
patterns = torch.randn(10, 1, 12, 12)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    Linear(16 * 36, 64),
    nn.ReLU(),
    Linear(64, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
losses = []
for _ in range(STEPS):
    y = torch.randint(10, (64,))
    x = patterns[y] + 2.5 * torch.randn(64, 1, 12, 12)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if UNSCALE_FIRST:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
