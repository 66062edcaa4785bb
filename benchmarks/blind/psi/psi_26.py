"""A linear state-space model that adds up long signals; its projections and its state matrix go through FP8."""
import os
import sys

import torch
import torch.nn as nn

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
STATE, LENGTH, BATCH, STEPS = 32, 400, 16, 100
F8 = torch.float8_e4m3fn


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        scale = x.abs().amax().clamp(min=1e-12) / 448
        return (x / scale).to(F8).to(x.dtype) * scale

    @staticmethod
    def backward(ctx, grad):
        return grad


def fp8(x):
    return x if plain else Cast.apply(x)


class SSM(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_rate = nn.Parameter(torch.linspace(-6.5, -2.5, STATE))
        self.b = nn.Linear(2, STATE)
        self.mix = nn.Linear(STATE, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        decay = torch.exp(-self.log_rate.exp())
        if mode == "bad":
            decay = fp8(decay)
        u = nn.functional.linear(fp8(x), fp8(self.b.weight), self.b.bias)
        h, states = torch.zeros(len(x), STATE), []
        for t in range(LENGTH):
            h = decay * h + u[:, t] / 8
            if t % 10 == 9:
                states.append(h)
        h = torch.stack(states, 1)
        return self.out(torch.tanh(nn.functional.linear(fp8(h), fp8(self.mix.weight), self.mix.bias))).squeeze(-1)


def batch():
    """Target: an average that forgets with 0.99, another with 0.97, of the gated signal."""
    x = torch.randn(BATCH, LENGTH, 2)
    a, b, targets = torch.zeros(BATCH), torch.zeros(BATCH), []
    for t in range(LENGTH):
        a, b = 0.99 * a + 0.1 * x[:, t, 0], 0.97 * b + 0.2 * x[:, t, 1]
        if t % 10 == 9:
            targets.append(a - b)
    return x, torch.stack(targets, 1)


model = SSM()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
losses = []
for step in range(STEPS):
    x, y = batch()
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
