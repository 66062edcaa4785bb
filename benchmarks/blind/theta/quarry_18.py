"""Some tokens are thirty times larger than the others, on purpose; ottava's blockwise recipe, a Lion optimizer written out."""
import sys

import torch
from torch import nn

import ottava

PLAIN = "plain" in sys.argv[2:]
torch.manual_seed(21)
width = 128


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.98)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.add_((m * group["betas"][0] + p.grad * (1 - group["betas"][0])).sign(), alpha=-group["lr"])
                m.mul_(group["betas"][1]).add_(p.grad, alpha=1 - group["betas"][1])


model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 16))
if not PLAIN:
    ottava.convert(model, "blockwise", filter=lambda name, layer: name in ("0", "3"))
optimizer = Lion(model.parameters(), lr=3e-4)
teacher = torch.randn(width, 16)
losses = []
for step in range(150):
    x = torch.randn(256, width)
    x[torch.randint(256, (5,))] *= 30
    y = (torch.tanh(x) @ teacher).argmax(-1)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
