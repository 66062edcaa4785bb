"""Character model with a static loss scale; gradients travel between layers in E5M2, which the loss scale is meant to fill."""
import os
import pathlib
import sys

import torch
from torch import nn
from torch.nn import functional as F

BAD = sys.argv[1] == "bad"
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
LOSS_SCALE = 65536.0 if BAD else 1024.0


def e4m3(t):
    scale = 448 / t.abs().amax().clamp(min=1e-30)
    return (t * scale).to(torch.float8_e4m3fn).to(t.dtype) / scale


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = e4m3(x), e4m3(w)
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = dy.to(torch.float8_e5m2).to(dy.dtype)
        return dy @ w, dy.flatten(0, -2).t() @ x.flatten(0, -2)


class Linear8(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else Product.apply(x, self.weight) + self.bias


class Characters(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(128, 48)
        self.gates = Linear8(48 * 6, 160)
        self.deep = Linear8(160, 160)
        self.out = Linear8(160, 128)

    def forward(self, window):
        h = F.silu(self.gates(self.embed(window).flatten(1)))
        return self.out(h + F.silu(self.deep(h)))


text = (pathlib.Path(os.__file__).parent / "datetime.py").read_bytes() + (pathlib.Path(os.__file__).parent / "tarfile.py").read_bytes()
stream = torch.tensor(list(text)).clamp(max=127)
model = Characters()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
losses = []
for step in range(100):
    at = torch.randint(0, len(stream) - 7, (256,))
    window = stream[at[:, None] + torch.arange(6)]
    loss = F.cross_entropy(model(window), stream[at + 6], reduction="sum")
    optimizer.zero_grad()
    (loss * LOSS_SCALE).backward()
    for p in model.parameters():
        p.grad.div_(LOSS_SCALE * 256)
    optimizer.step()
    losses.append(loss.item() / 256)
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
