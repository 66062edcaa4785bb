"""Prodigy by hand: the step size begins at a millionth and is estimated while the net trains, so nothing happens at first."""
import os

import torch
import torch.nn.functional as F
from torch import nn

import ottava

SEED = int(os.environ.get("SEED", "0"))
torch.manual_seed(SEED)


class Prodigy(torch.optim.Optimizer):
    """Mishchenko and Defazio, 2023, for one group; lr stays at 1."""

    def __init__(self, params, lr=1.0, betas=(0.9, 0.99), eps=1e-8, d0=1e-6):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "d": d0, "d0": d0, "r": 0.0})

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        (one, two), d, d0 = group["betas"], group["d"], group["d0"]
        three = two**0.5
        weight = d * group["lr"] * d / d0 * (1 - three) / d0
        moved, size = 0.0, 0.0
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state.update(start=p.clone(), m=torch.zeros_like(p), v=torch.zeros_like(p), s=torch.zeros_like(p))
            moved += torch.sum(p.grad * (state["start"] - p)).item()
            state["m"].mul_(one).add_(p.grad, alpha=d * (1 - one))
            state["v"].mul_(two).addcmul_(p.grad, p.grad, value=d * d * (1 - two))
            state["s"].mul_(three).add_(p.grad, alpha=weight * d0)
            size += state["s"].abs().sum().item()
        group["r"] = three * group["r"] + weight * moved
        group["d"] = max(d, group["r"] * d0 / size) if size else d
        for p in group["params"]:
            state = self.state[p]
            p.addcdiv_(state["m"], state["v"].sqrt() + d * group["eps"], value=-group["lr"] * d)


def rows(count):
    """Eleven classes of a table with 20 columns: which of the columns is largest after a mix."""
    x = torch.randn(count, 20)
    return x, (x @ mix).argmax(1)


mix = torch.randn(20, 11)
net = nn.Sequential(
    nn.Linear(20, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 11)
)
ottava.convert(net, "rowwise_with_gw_hp", filter=lambda name, layer: name in ("3", "5"))
optimizer = Prodigy(net.parameters())
held = rows(1000)


@torch.no_grad()
def held_out():
    net.eval()
    loss = F.cross_entropy(net(held[0]), held[1]).item()
    net.train()
    return loss


print("first loss %.4f" % held_out())
for step in range(260):
    x, y = rows(128)
    loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.4f}, d {optimizer.param_groups[0]['d']:.2e}, {held_out():.4f}")
print("final loss %.4f" % held_out())
