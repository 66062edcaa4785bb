"""The loss is multiplied by 4096 and gradients by 1/4096 before the step; gradients pass E5M2 with a fixed scale of one."""
import sys

import torch
from torch import nn

PLAIN = "plain" in sys.argv[2:]
FACTOR = 4096.0


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad if PLAIN else grad.clamp(-57344, 57344).to(torch.float8_e5m2).float()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = 0.3

    def forward(self, x):
        y = Through.apply(self.down(nn.functional.gelu(Through.apply(self.up(self.norm(x))))))
        if torch.rand(()) < self.drop:  # stochastic depth
            return x
        return x + y / (1 - self.drop)


torch.manual_seed(62)
width, classes = 96, 24
model = nn.Sequential(nn.Linear(64, width), *(Block(width) for _ in range(4)), nn.LayerNorm(width), nn.Linear(width, classes))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
centres = torch.randn(classes, 64)
losses = []
for step in range(150):
    y = torch.randint(classes, (96,))
    loss = nn.functional.cross_entropy(model(centres[y] + 1.6 * torch.randn(96, 64)), y)
    optimizer.zero_grad()
    (loss * FACTOR).backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= FACTOR
    nn.utils.clip_grad_norm_(model.parameters(), 2.0)
    optimizer.step()
    losses.append(loss.item())
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
