"""An actor and a critic with FP8 layers learn to walk to a goal in a 7 x 7 room."""
import sys

import torch
import torch.nn.functional as F
from torch import nn

from models import Fp8Linear, Report

BAD = sys.argv[1] == "bad"
MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])


def see(place, goal):
    return torch.cat([F.one_hot(p, 7).flatten(1) for p in (place, goal)], 1).float()


def net(out):
    return nn.Sequential(Fp8Linear(28, 96), nn.Tanh(), Fp8Linear(96, 64), nn.Tanh(), nn.Linear(64, out))


torch.manual_seed(0)
actor, critic = net(4), net(1)
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=5e-3)
report, rewards = Report(), []
for step in range(150):
    place, goal = torch.randint(0, 7, (48, 2)), torch.randint(0, 7, (48, 2))
    views, actions, gains = [], [], []
    for _ in range(8):
        view = see(place, goal)
        with torch.no_grad():
            action = torch.distributions.Categorical(logits=actor(view)).sample()
        before = (place - goal).abs().sum(1)
        place = (place + MOVES[action]).clamp(0, 6)
        gains.append((before - (place - goal).abs().sum(1)).float() + (place == goal).all(1).float())
        views.append(view)
        actions.append(action)
    total, returns = torch.zeros(48), []
    for gain in reversed(gains):
        total = gain + 0.8 * total
        returns.insert(0, total)
    view, action, target = torch.cat(views), torch.cat(actions), torch.cat(returns)
    value = critic(view).squeeze(-1)
    advantage = (target - value).detach()
    log_prob = F.log_softmax(actor(view), -1).gather(1, action[:, None])
    log_prob = log_prob if BAD else log_prob[:, 0]
    loss = -(advantage * log_prob).mean() + 0.5 * (target - value).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    report.add(loss)
    rewards.append(torch.stack(gains).sum(0).mean().item())
report.end(reward=sum(rewards[-20:]) / 20, reward_first=sum(rewards[:20]) / 20)
