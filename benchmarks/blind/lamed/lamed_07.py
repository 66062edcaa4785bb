"""Multiple instance learning: one label for a bag of many patches, pooled by attention. Matmuls run on FP8 operands."""
import os
import sys

import torch
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, BAGS, PATCHES, FEATURES, DIM = 120, 12, 2048, 24, 32


class Cast(torch.autograd.Function):
    """Value of the FP8 code; the gradient passes."""

    @staticmethod
    def forward(ctx, x, scaled):
        scale = 448.0 / x.abs().max().clamp(min=1e-12) if scaled else 1.0
        return (x * scale).to(torch.float8_e4m3fn).float() / scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def fp8(x, scaled=True):
    return x if PLAIN else Cast.apply(x, scaled)


class Fp8Linear(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(fp8(x), fp8(self.weight), self.bias)


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Sequential(nn.Linear(FEATURES, DIM), nn.ReLU(), Fp8Linear(DIM, DIM))
        self.key = Fp8Linear(DIM, DIM)
        self.query = nn.Parameter(torch.randn(4, DIM) * 0.3)
        self.head = nn.Sequential(nn.Linear(4 * DIM, DIM), nn.ReLU(), nn.Linear(DIM, 1))

    def forward(self, patches):
        value = self.patch(patches)
        scores = torch.einsum("hd,bnd->bhn", fp8(self.query), fp8(self.key(value))) / DIM**0.5
        weights = scores.softmax(-1)
        weights = fp8(weights, scaled=MODE == "good")
        pooled = torch.einsum("bhn,bnd->bhd", weights, fp8(value))
        return self.head(pooled.flatten(1)).squeeze(-1)


def bags(directions):
    share = torch.rand(BAGS, 1, 1) * 0.6
    ill = torch.rand(BAGS, PATCHES, 1) < share
    patches = torch.randn(BAGS, PATCHES, FEATURES) + ill * directions[0]
    return patches, (share.flatten() > 0.3).float()


torch.manual_seed(SEED)
directions = torch.randn(1, FEATURES) * 0.8
model = Bag()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(STEPS):
    patches, label = bags(directions)
    loss = nn.functional.binary_cross_entropy_with_logits(model(patches), label)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"final loss {sum(losses[-25:]) / 25:.4f}")
