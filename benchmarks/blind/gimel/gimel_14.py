"""Forecasts loads from weather; AdamW whose second moment (its root) is kept in eight bits."""

import os
import sys

import torch
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
torch.manual_seed(int(os.environ.get("SEED", "0")))
STEPS = 200


class CompactAdamW(torch.optim.Optimizer):
    """AdamW; `compact` keeps the root of the second moment as codes with a power of two for each row."""

    def __init__(self, params, lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01, compact=True):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, compact=compact))

    @staticmethod
    def pack(root):
        top = root.amax(-1, keepdim=True).clamp(min=1e-30)
        exponent = torch.floor(torch.log2(448.0 / top))
        return torch.ldexp(root, exponent).to(torch.float8_e4m3fn), exponent

    @staticmethod
    def unpack(codes, exponent):
        return torch.ldexp(codes.float(), -exponent)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, first=torch.zeros_like(p), second=torch.zeros_like(p))
                    if group["compact"]:
                        state["second"] = self.pack(state["second"])
                state["step"] += 1
                state["first"].lerp_(p.grad, 1 - b1)
                root = self.unpack(*state["second"]) if group["compact"] else state["second"]
                root = (b2 * root.square() + (1 - b2) * p.grad.square()).sqrt()
                if group["compact"]:
                    state["second"] = self.pack(root)
                    root = self.unpack(*state["second"])
                else:
                    state["second"] = root
                mean = state["first"] / (1 - b1 ** state["step"])
                root = root / (1 - b2 ** state["step"]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(mean, root + group["eps"], value=-group["lr"])


mix, bend = torch.randn(16, 4) / 4, torch.tensor([3.0, -2.0, 1.0, 2.0])


def batch(n=256):
    x = torch.randn(n, 16)
    return x, 30 + torch.tanh(x @ mix) @ bend


model = nn.Sequential(nn.Linear(16, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 1))
if not PLAIN:
    ottava.convert(model, "mxfp8")
optimizer = CompactAdamW(model.parameters(), lr=5e-3, compact=MODE == "bad" and not PLAIN)
losses = []
for step in range(STEPS):
    x, y = batch()
    loss = (model(x).squeeze(1) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, f"{losses[-1]:.4f}")
print(f"final loss {sum(losses[-15:]) / 15:.4f}")
