"""Adam whose two moments are stored in FP8, the second one as its root."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

STATE_BLOCK = {"good": 128, "bad": None}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


def blocks(x, size, dtype, top):
    flat = x.flatten()
    flat = F.pad(flat, (0, -len(flat) % size)).view(-1, size)
    scale = top / flat.abs().amax(1, keepdim=True).clamp(min=1e-30)
    codes = (flat * scale).to(dtype)
    return (codes.to(x.dtype) / scale).flatten()[: x.numel()].view_as(x)


def store_first(x):
    if PLAIN:
        return x
    if STATE_BLOCK is None:
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)
    return blocks(x, STATE_BLOCK, torch.float8_e4m3fn, 448)


def store_second(x):
    return x if PLAIN else blocks(x.sqrt(), 64, torch.float8_e5m2, 57344).square()


class Adam8(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.99), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                m = state["m"].mul(b1).add(p.grad, alpha=1 - b1)
                v = state["v"].mul(b2).addcmul(p.grad, p.grad, value=1 - b2)
                state["m"], state["v"] = store_first(m), store_second(v)
                m_hat = state["m"] / (1 - b1 ** state["step"])
                v_hat = state["v"] / (1 - b2 ** state["step"])
                p.sub_(m_hat / (v_hat.sqrt() + group["eps"]), alpha=group["lr"])


torch.manual_seed(0)
net = nn.Sequential(nn.Embedding(96, 48), nn.Flatten(), nn.Linear(144, 192), nn.GELU(), nn.Linear(192, 96))
optimizer = Adam8(net.parameters(), lr=2e-3)
weights = 1 / torch.arange(1, 97).float()
successor = torch.randperm(96)
losses = []
for _step in range(100):
    x = torch.multinomial(weights, 3 * 128, replacement=True).view(128, 3)
    loss = F.cross_entropy(net(x), successor[x[:, 2]])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
