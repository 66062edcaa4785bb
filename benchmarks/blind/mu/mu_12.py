"""Adam with its second moments in eight bits, on the response of an amplifier."""

import sys

import torch
from torch import nn

OPTIONS = {"good": {"row_scales": True}, "bad": {"row_scales": False}}[sys.argv[1]]
PLAIN = "plain" in sys.argv
WIDTH, STEPS = 96, 180


class Codes:
    """A tensor in E5M2, rounded at random, so that small changes are right on average."""

    def __init__(self, values, row_scales):
        self.row_scales, self.scale = row_scales, 1.0
        self.write(values)

    def write(self, values):
        if PLAIN:
            self.values = values.clone()
            return
        if self.row_scales:
            self.scale = 57344.0 / values.amax(-1, keepdim=True).clamp(min=1e-30)
        scaled = values * self.scale
        spacing = torch.exp2(torch.floor(torch.log2(scaled.clamp(min=2.0**-14))) - 2)
        scaled = torch.floor(scaled / spacing + torch.rand_like(scaled)) * spacing
        self.codes = scaled.clamp(max=57344.0).to(torch.float8_e5m2)

    def read(self):
        return self.values if PLAIN else self.codes.float() / self.scale


class LeanAdam(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.95), eps=1e-8, row_scales=True):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "row_scales": row_scales})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["mean"] = torch.zeros_like(p)
                    state["square"] = Codes(torch.zeros_like(p), group["row_scales"])
                state["step"] += 1
                state["mean"].lerp_(p.grad, 1 - first)
                square = state["square"].read() * second + p.grad.square() * (1 - second)
                state["square"].write(square)
                square = state["square"].read() / (1 - second ** state["step"])
                mean = state["mean"] / (1 - first ** state["step"])
                p.sub_(group["lr"] * mean / (square.sqrt() + group["eps"]))


class Amplifier(nn.Module):
    def __init__(self, gain=6.0):
        super().__init__()
        self.gain = gain
        self.net = nn.Sequential(
            nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 6)
        )

    def forward(self, x):
        return self.gain * self.net(x)


torch.manual_seed(31)
field = torch.randn(16, 6) / 4
model = Amplifier()
optimizer = LeanAdam(model.parameters(), lr=1e-3, **OPTIONS)
losses = []
for step in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * min(1.0, (step + 1) / 10)
    x = torch.randn(192, 16)
    loss = nn.functional.mse_loss(model(x), torch.tanh(x @ field))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, round(losses[-1], 4))
print(f"loss {sum(losses[-10:]) / 10:.4f}")
