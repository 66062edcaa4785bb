"""A character model of Python's own sources, with Adam whose states take one byte each."""
import inspect
import sys
import textwrap

import torch
from torch import nn
from torch.nn import functional as F

VARIANT, PLAIN = sys.argv[1], "plain" in sys.argv
torch.manual_seed(2)
text = inspect.getsource(textwrap) + inspect.getsource(inspect)
data = torch.tensor([min(b, 127) for b in text.encode()])


class Small:
    """A tensor in E4M3 with one scale."""

    def __init__(self, x):
        self.scale = x.abs().max().clamp(min=1e-30) / 448
        self.codes = (x / self.scale).to(torch.float8_e4m3fn)

    def full(self):
        return self.codes.float() * self.scale


class Full:
    def __init__(self, x):
        self.x = x.clone()

    def full(self):
        return self.x


class Adam8(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.95), eps=3e-7, kinds=(Small, Small)):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self.kinds = kinds

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s.update(t=0, m=self.kinds[0](torch.zeros_like(p)), v=self.kinds[1](torch.zeros_like(p)))
                s["t"] += 1
                m = s["m"].full() * b1 + p.grad * (1 - b1)
                v = s["v"].full() * b2 + p.grad.square() * (1 - b2)
                s["m"], s["v"] = self.kinds[0](m), self.kinds[1](v)
                m, v = s["m"].full() / (1 - b1 ** s["t"]), s["v"].full() / (1 - b2 ** s["t"])
                p -= group["lr"] * m / (v.sqrt() + group["eps"])


class Chars(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(128, 24)
        self.net = nn.Sequential(nn.Linear(8 * 24, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128))

    def forward(self, x):
        return self.net(self.embed(x).flatten(1))


model = Chars()
kinds = (Full, Full) if PLAIN else {"good": (Small, Full), "bad": (Small, Small)}[VARIANT]
optimizer = Adam8(model.parameters(), lr=3e-3, kinds=kinds)
losses = []
for step in range(300):
    at = torch.randint(0, len(data) - 9, (128, 1))
    rows = data[at + torch.arange(9)]
    loss = F.cross_entropy(model(rows[:, :8]), rows[:, 8])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-20:]) / 20:.4f}")
