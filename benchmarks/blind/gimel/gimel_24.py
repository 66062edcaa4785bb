"""Policy gradient on a crowd of small bandits with contexts; the linears cast to FP8 by hand."""

import os
import sys

import torch
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
torch.manual_seed(int(os.environ.get("SEED", "0")))
CONTEXT, ACTIONS, STEPS, CROWD = 32, 8, 200, 96


class Multiply(torch.autograd.Function):
    @staticmethod
    def quantize(t, dtype):
        scale = torch.finfo(dtype).max / t.abs().amax(1, keepdim=True).clamp(min=1e-20)
        return (t * scale).to(dtype).float() / scale

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return Multiply.quantize(x, torch.float8_e4m3fn) @ Multiply.quantize(w, torch.float8_e4m3fn).t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        dx = Multiply.quantize(g, torch.float8_e5m2) @ Multiply.quantize(w.t(), torch.float8_e4m3fn).t()
        dw = Multiply.quantize(g.t(), torch.float8_e5m2) @ Multiply.quantize(x.t(), torch.float8_e4m3fn).t()
        return dx, dw


class Linear(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else Multiply.apply(x, self.weight) + self.bias


policy = nn.Sequential(Linear(CONTEXT, 96), nn.Tanh(), Linear(96, 96), nn.Tanh(), nn.Linear(96, ACTIONS))
best = torch.randn(CONTEXT, ACTIONS)
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
running, rewards, losses = 0.0, [], []
for step in range(STEPS):
    context = torch.randn(CROWD, CONTEXT)
    choice = torch.distributions.Categorical(logits=policy(context))
    action = choice.sample()
    quality = (context @ best)[torch.arange(CROWD), action]
    jackpot = 20.0 * (torch.rand(CROWD) < 0.01)
    reward = quality + 2.0 * torch.randn(CROWD) + jackpot
    advantage = reward - running
    running = 0.9 * running + 0.1 * reward.mean().item()
    loss = -(choice.log_prob(action) * advantage).mean() - 0.02 * choice.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 2.0)
    optimizer.step()
    losses.append(loss.item())
    rewards.append(reward.mean().item())
    if step % 20 == 0:
        print(step, f"loss {losses[-1]:.4f} reward {rewards[-1]:.3f}")
print(f"mean reward of the last 30 steps: {sum(rewards[-30:]) / 30:.3f}")
print(f"final loss {sum(losses[-30:]) / 30:.4f}")
