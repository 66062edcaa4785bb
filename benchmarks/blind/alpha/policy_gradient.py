"""REINFORCE with a learned baseline: walk to the goal on a ring of 16 fields."""

import sys

import torch
from torch import nn

from models import MLP

assert sys.argv[1] == "good"
torch.manual_seed(4)
N = 16
policy, value = MLP(N, 64, 64, 3), MLP(N, 64, 1)
opt = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=3e-3)


def observe(at, goal):
    return nn.functional.one_hot((goal - at) % N, N).float()


for step in range(70):
    at, goal = torch.randint(N, (32,)), torch.randint(N, (32,))
    states, actions, rewards = [], [], []
    for _ in range(12):
        obs = observe(at, goal)
        with torch.no_grad():
            action = torch.distributions.Categorical(logits=policy(obs)).sample()
        at = (at + action - 1) % N
        states.append(obs)
        actions.append(action)
        rewards.append((at == goal).float())
    returns, total = [], torch.zeros(32)
    for r in reversed(rewards):
        total = r + 0.95 * total
        returns.insert(0, total)
    states, actions, returns = torch.cat(states), torch.cat(actions), torch.cat(returns)
    base = value(states).squeeze(-1)
    dist = torch.distributions.Categorical(logits=policy(states))
    advantage = returns - base.detach()
    loss = (
        -(dist.log_prob(actions) * advantage).mean()
        + 0.5 * (base - returns).square().mean()
        - 0.01 * dist.entropy().mean()
    )
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
    opt.step()
    if step % 10 == 9:
        print(f"step {step} loss {loss.item():.4f} return {torch.stack(rewards).sum(0).mean().item():.3f}", flush=True)
