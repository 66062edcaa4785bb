"""The cost to come of a network of waiting lines by temporal differences, with a slow target network held in FP8."""
import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn

from models import E4M3, Report

BAD = sys.argv[1] == "bad"
STATES, GAMMA, TAU = 80, 0.8, 0.04


class SlowCopy:
    """Follows a network with the rate TAU; its matrices are FP8 codes and a scale a row."""

    def __init__(self, net):
        self.net = copy.deepcopy(net).requires_grad_(False)
        self.exact = [p.detach().clone() for p in net.parameters()]
        self.codes = [self.pack(p) for p in self.exact]

    def pack(self, p):
        scale = p.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
        return (p / scale).to(E4M3), scale

    @torch.no_grad()
    def follow(self, net):
        for i, (slow, p) in enumerate(zip(self.net.parameters(), net.parameters())):
            codes, scale = self.codes[i]
            old = codes.float() * scale if BAD else self.exact[i]
            self.exact[i] = old.lerp(p, TAU)
            self.codes[i] = self.pack(self.exact[i])
            codes, scale = self.codes[i]
            slow.copy_(codes.float() * scale)


torch.manual_seed(0)
features = torch.randn(STATES, 64)
move = torch.softmax(3 * torch.randn(STATES, STATES), 1)
cost = 0.5 + torch.rand(STATES)
truth = torch.linalg.solve(torch.eye(STATES) - GAMMA * move, cost)
net = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 1))
target = SlowCopy(net)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
report = Report()
for step in range(300):
    state = torch.randint(0, STATES, (128,))
    after = torch.multinomial(move[state], 1)[:, 0]
    goal = cost[state] + GAMMA * target.net(features[after])[:, 0]
    loss = F.smooth_l1_loss(net(features[state])[:, 0], goal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    target.follow(net)
    report.add(loss)
with torch.no_grad():
    report.end(value_error=(net(features)[:, 0] - truth).abs().mean())
