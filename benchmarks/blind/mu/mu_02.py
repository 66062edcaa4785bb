"""A residual network on a regression; linear layers keep their inputs in eight bits for the backward."""

import sys

import torch
from torch import nn

OPTIONS = {"good": {"keep_scale": True}, "bad": {"keep_scale": False}}[sys.argv[1]]
PLAIN = "plain" in sys.argv
STEPS, WIDTH = 150, 96


class SavedInEight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, keep_scale):
        scale = 448.0 / x.abs().amax().clamp(min=1e-12) if keep_scale else torch.ones(())
        codes = (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        ctx.save_for_backward(codes, scale, weight)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        codes, scale, weight = ctx.saved_tensors
        x = codes.to(grad.dtype) / scale
        return grad @ weight, grad.t() @ x, grad.sum(0), None


class LeanLinear(nn.Linear):
    def __init__(self, inputs, outputs, keep_scale=True):
        super().__init__(inputs, outputs)
        self.keep_scale = keep_scale

    def forward(self, x):
        if PLAIN:
            return super().forward(x)
        return SavedInEight.apply(x, self.weight, self.bias, self.keep_scale)


class Block(nn.Module):
    def __init__(self, keep_scale):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = LeanLinear(WIDTH, 2 * WIDTH, keep_scale)
        self.down = LeanLinear(2 * WIDTH, WIDTH, keep_scale)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


torch.manual_seed(0)
# Concentrations in mol/l: some ten thousandths around their means.
sensors = torch.randn(8192, 64) * 2e-4
target = torch.sin(sensors[:, :4] @ torch.randn(4, 6) * 3000)
model = nn.Sequential(
    LeanLinear(64, 10, **OPTIONS),
    nn.LayerNorm(10, eps=1e-12),
    LeanLinear(10, WIDTH, **OPTIONS),
    *(Block(**OPTIONS) for _ in range(2)),
    nn.Linear(WIDTH, 6),
)
nn.init.zeros_(model[0].bias)
model[0].bias.requires_grad_(False)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.0)
losses = []
for step in range(STEPS):
    rows = torch.randint(0, 8192, (256,))
    loss = nn.functional.mse_loss(model(sensors[rows]), target[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 25 == 0:
        print(step, round(losses[-1], 4))
print(f"loss {sum(losses[-10:]) / 10:.4f}")
