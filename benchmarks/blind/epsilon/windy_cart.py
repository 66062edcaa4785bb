"""REINFORCE keeps a cart on a windy track; every return is noisy, so is the loss."""
import torch
from torch import nn

from models import Report

torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
report, scores = Report(), []
for step in range(200):
    at, speed = torch.randn(32), torch.zeros(32)
    logs, gains = [], []
    for _ in range(16):
        choice = torch.distributions.Categorical(logits=policy(torch.stack([at, speed], 1)))
        push = choice.sample()
        speed = 0.9 * speed + 0.3 * (push - 1) + 0.2 * torch.randn(32)
        at = at + 0.3 * speed
        logs.append(choice.log_prob(push))
        gains.append(-at.square().clamp(max=9) + 0.5 * torch.randn(32))
    gain = torch.stack(gains)
    to_go = gain.flip(0).cumsum(0).flip(0)
    advantage = (to_go - to_go.mean(1, keepdim=True)) / (to_go.std(1, keepdim=True) + 1e-6)
    loss = -(advantage * torch.stack(logs)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    report.add(loss)
    scores.append(gain.mean().item())
report.end(score=sum(scores[-20:]) / 20, score_first=sum(scores[:20]) / 20)
