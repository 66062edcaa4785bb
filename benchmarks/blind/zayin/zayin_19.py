"""The parity of four of twenty bits: the loss stands near ln 2 until the network has found the four.

Trained with fresh rows in each step under a recipe of ottava, with a small SOAP (Adam in the eigenbasis of Shampoo).

python zayin_19.py good|bad
"""

import os

import torch
from torch import nn

import ottava

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
BITS, SECRET, WIDTH = 20, (1, 6, 11, 17), 256


def rows(count):
    x = torch.randint(0, 2, (count, BITS)).float() * 2 - 1
    return x, (x[:, SECRET].prod(dim=1) > 0).float()


class Soap(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.95), eps=1e-8, every=10):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "every": every})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                g, state = p.grad, self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(g), v=torch.zeros_like(g))
                    if g.dim() == 2 and min(g.shape) > 1:
                        state["sides"] = [torch.zeros(n, n) for n in g.shape]
                        state["bases"] = [torch.eye(n) for n in g.shape]
                state["step"] += 1
                turned = g
                if "sides" in state:
                    left, right = state["sides"]
                    left.lerp_(g @ g.T, 1 - b2)
                    right.lerp_(g.T @ g, 1 - b2)
                    if state["step"] % group["every"] == 1:
                        old = state["bases"]
                        new = [torch.linalg.eigh(side + 1e-12 * torch.eye(len(side)))[1] for side in (left, right)]
                        state["bases"] = new
                        state["m"] = new[0].T @ (old[0] @ state["m"] @ old[1].T) @ new[1]
                    ql, qr = state["bases"]
                    turned = ql.T @ g @ qr
                state["m"].lerp_(turned, 1 - b1)
                state["v"].mul_(b2).addcmul_(turned, turned, value=1 - b2)
                m = state["m"] / (1 - b1 ** state["step"])
                v = state["v"] / (1 - b2 ** state["step"])
                move = m / (v.sqrt() + group["eps"])
                if "sides" in state:
                    move = ql @ move @ qr.T
                p.add_(move, alpha=-group["lr"])


model = nn.Sequential(nn.Linear(BITS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))
ottava.convert(model, "rowwise")
optimizer = Soap(model.parameters(), lr=3e-3)
test_x, test_y = rows(2048)


def held_out():
    with torch.no_grad():
        return nn.functional.binary_cross_entropy_with_logits(model(test_x).squeeze(1), test_y).item()


print(f"first loss {held_out():.4f}")
for step in range(240):
    x, y = rows(512)
    loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {held_out():.4f}")
