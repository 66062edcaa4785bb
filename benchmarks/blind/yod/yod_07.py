"""Feedback alignment: errors go back through fixed random matrices, not through the transposed weights.

    python yod_07.py good

The products run on numbers that were rounded to E4M3 (values and weights) and E5M2 (errors), with a scale per tensor.
"""

import os

import torch
import torch.nn.functional as F
from torch import nn

SEED = int(os.environ.get("SEED", "0"))
INPUTS, CLASSES, STEPS = 80, 10, 260


def rounded(x, kind):
    top = torch.finfo(kind).max
    scale = top / x.abs().amax().clamp(min=1e-12)
    return (x * scale).clamp(-top, top).to(kind).to(x.dtype) / scale


class RandomBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, back):
        x8 = rounded(x, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, back)
        return F.linear(x8, rounded(weight, torch.float8_e4m3fn), bias)

    @staticmethod
    def backward(ctx, error):
        x8, back = ctx.saved_tensors
        error8 = rounded(error, torch.float8_e5m2)
        return error8 @ back, error8.T @ x8, error.sum(0), None


class FeedbackLinear(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.register_buffer("back", torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x):
        return RandomBack.apply(x, self.weight, self.bias, self.back)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = FeedbackLinear(INPUTS, 192), FeedbackLinear(192, 96)
        self.head = FeedbackLinear(96, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Source:
    def __init__(self, generator):
        self.generator = generator
        self.centres = torch.randn(CLASSES, 3, INPUTS, generator=generator)

    def batch(self, count):
        label = torch.randint(CLASSES, (count,), generator=self.generator)
        which = torch.randint(3, (count,), generator=self.generator)
        return 0.7 * self.centres[label, which] + torch.randn(count, INPUTS, generator=self.generator), label


def alignment(layer):
    """The cosine of the weights with the matrix that carries errors back; it grows by itself."""
    return F.cosine_similarity(layer.weight.flatten(), layer.back.flatten(), dim=0).item()


def main():
    torch.manual_seed(SEED)
    source = Source(torch.Generator().manual_seed(50 + SEED))
    held = source.batch(2000)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    def evaluate():
        net.eval()
        with torch.no_grad():
            value = F.cross_entropy(net(held[0]), held[1]).item()
        net.train()
        return value

    print(f"first loss {evaluate():.4f}")
    for step in range(STEPS):
        x, label = source.batch(128)
        loss = F.cross_entropy(net(x), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 40 == 0:
            print(f"step {step} loss {loss.item():.4f} alignment of the head {alignment(net.head):.3f}")
    print(f"final loss {evaluate():.4f}")


main()
