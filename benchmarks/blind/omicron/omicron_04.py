"""Adam with both moments in eight bits, on a regression of a random network's outputs."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

SCALE_SECOND = {"good": True, "bad": False}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


def encode(x, scaled=True):
    scale = 448.0 / x.abs().amax().clamp(min=1e-30) if scaled else torch.ones(())
    return (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def decode(kept):
    return kept[0].float() / kept[1]


class Adam8(torch.optim.Optimizer):
    """Keeps the first moment and the root of the second one as codes."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.95), eps=1e-5, scale_second=True):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "scale_second": scale_second})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                count = state["count"] = state.get("count", 0) + 1
                first = decode(state["first"]) if count > 1 else torch.zeros_like(p)
                second = decode(state["second"]).square() if count > 1 else torch.zeros_like(p)
                state["first"] = encode(first.lerp(p.grad, 1 - beta1))
                second = second.lerp(p.grad.square(), 1 - beta2)
                state["second"] = encode(second.sqrt(), group["scale_second"])
                root = decode(state["second"]) / (1 - beta2**count) ** 0.5
                p.addcdiv_(decode(state["first"]) / (1 - beta1**count), root + group["eps"], value=-group["lr"])


torch.manual_seed(5)
teacher = nn.Sequential(nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 8))
student = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))
if PLAIN:
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-5)
else:
    optimizer = Adam8(student.parameters(), lr=1e-3, scale_second=SCALE_SECOND)
losses = []
for _ in range(160):
    x = torch.randn(128, 128)
    with torch.no_grad():
        y = 2 * teacher(x)
    loss = F.mse_loss(student(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.5f}")
