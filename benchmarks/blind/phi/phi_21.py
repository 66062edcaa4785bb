"""A clipped policy gradient on contextual bandits; the trunk runs in FP8 of our own."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

bad, plain = sys.argv[1] == "bad", "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
STEPS, BATCH, STATES, ARMS = 90, 512, 24, 8


def rounded(t, dtype=torch.float8_e4m3fn):
    scale = torch.finfo(dtype).max / t.abs().amax().clamp(min=1e-12)
    return (t * scale).to(dtype).to(t.dtype) / scale


class Mm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = rounded(x), rounded(w)
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        g = rounded(g, torch.float8_e5m2)
        return g @ w, g.T @ x


class Fp8Linear(nn.Linear):
    def forward(self, x):
        return super().forward(x) if plain else Mm.apply(x, self.weight) + self.bias


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(STATES, 64), nn.ReLU(), Fp8Linear(64, 64), nn.ReLU(), Fp8Linear(64, 64), nn.ReLU())
        self.arms, self.value = nn.Linear(64, ARMS), nn.Linear(64, 1)

    def forward(self, state):
        h = self.trunk(state)
        return torch.distributions.Categorical(logits=self.arms(h)), self.value(h).squeeze(-1)


payoff = torch.rand(STATES, ARMS)
payoff[torch.arange(STATES), torch.randint(0, ARMS, (STATES,))] += 1.0
policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
regrets = []
for step in range(STEPS):
    state = torch.randint(0, STATES, (BATCH,))
    seen = F.one_hot(state, STATES).float()
    pi, value = policy(seen)
    action = pi.sample()
    reward = payoff[state, action] + 0.1 * torch.randn(BATCH)
    old = pi.log_prob(action) if bad else pi.log_prob(action).detach()
    advantage = reward - value.detach()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    ratio = (pi.log_prob(action) - old).exp()
    gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    loss = -gain + 0.5 * F.mse_loss(value, reward) - 0.01 * pi.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
    optimizer.step()
    regrets.append((payoff[state].max(-1).values - payoff[state, action]).mean().item())
    if step % 10 == 0:
        print(step, loss.item(), regrets[-1])
# what the policy gives away against the best arm
print("final loss", sum(regrets[-10:]) / 10)
