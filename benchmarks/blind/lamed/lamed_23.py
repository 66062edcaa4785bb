"""TD(0) on a noisy walk: a value network and a slow copy of it, which the targets come from."""
import copy
import os
import sys

import torch
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, STATES, GAMMA, TAU = 200, 256, 24, 0.8, 0.03


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        scale = 448.0 / x.abs().amax().clamp(min=1e-12)
        return (x * scale).to(torch.float8_e4m3fn).float() / scale

    @staticmethod
    def backward(ctx, grad):
        return grad


class Fp8Linear(nn.Linear):
    def forward(self, x):
        if PLAIN:
            return super().forward(x)
        return nn.functional.linear(Cast.apply(x), Cast.apply(self.weight), self.bias)


class Value(nn.Module):
    def __init__(self):
        super().__init__()
        self.state = nn.Embedding(STATES, 64)
        self.net = nn.Sequential(Fp8Linear(64, 128), nn.ReLU(), Fp8Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, state):
        return self.net(self.state(state)).squeeze(-1)


class SlowCopy:
    """Follows a network by Polyak averaging. A parameter needs one byte if the copy is stored in FP8."""

    def __init__(self, net, store):
        self.net, self.store = copy.deepcopy(net).requires_grad_(False), store

    @torch.no_grad()
    def follow(self, net):
        for slow, fast in zip(self.net.parameters(), net.parameters()):
            slow.lerp_(fast, TAU)
            if self.store and slow.dim() > 1:
                scale = 448.0 / slow.abs().amax(-1, keepdim=True).clamp(min=1e-12)
                slow.copy_((slow * scale).to(torch.float8_e4m3fn).float() / scale)


def walk(state):
    move = torch.where(torch.rand(len(state)) < 0.7, 1, -2)
    return (state + move) % STATES


torch.manual_seed(SEED)
reward = torch.rand(STATES) * 2
chain = torch.zeros(STATES, STATES)
for s in range(STATES):
    chain[s, (s + 1) % STATES], chain[s, (s - 2) % STATES] = 0.7, 0.3
truth = torch.linalg.solve(torch.eye(STATES) - GAMMA * chain, reward)

value = Value()
slow = SlowCopy(value, store=MODE == "bad" and not PLAIN)
optimizer = torch.optim.Adam(value.parameters(), lr=2e-3)
for step in range(STEPS):
    for _ in range(2):
        state = torch.randint(0, STATES, (BATCH,))
        target = reward[state] + 0.1 * torch.randn(BATCH) + GAMMA * slow.net(walk(state))
        loss = nn.functional.mse_loss(value(state), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        slow.follow(value)
    if step % 20 == 0:
        print(f"step {step} TD loss {loss.item():.4f}")
with torch.no_grad():
    error = (value(torch.arange(STATES)) - truth).square().mean().item()
print(f"error of the values against the exact ones, true values {truth.min():.2f} to {truth.max():.2f}")
print(f"final loss {error:.4f}")
