"""PPO on a reacher: the policy loss hovers around 0, several epochs on each roll-out; the value net casts to E4M3 by hand."""
import os

import torch
from torch import nn
from torch.nn import functional as F

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
ROLLOUTS, LENGTH, WORLDS, EPOCHS, PARTS = 15, 24, 64, 3, 4
GAMMA, LAMBDA, CLIP = 0.97, 0.95, 0.2


def fp8(x):
    scale = 448.0 / x.detach().abs().amax().clamp(min=1e-12)
    q = (x.detach() * scale).to(torch.float8_e4m3fn).float() / scale
    return q + x - x.detach()


class CastLinear(nn.Linear):
    def forward(self, x):
        return F.linear(fp8(x), fp8(self.weight), self.bias)


class Reacher:
    """A point is pushed in the plane; the reward is minus its distance to a goal that is told."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.place, self.speed, self.goal = torch.randn(WORLDS, 2), torch.zeros(WORLDS, 2), torch.randn(WORLDS, 2)
        return self.view()

    def view(self):
        return torch.cat([self.goal - self.place, self.speed, self.place], 1)

    def step(self, push):
        self.speed = 0.8 * self.speed + 0.2 * push.clamp(-2, 2) + 0.02 * torch.randn(WORLDS, 2)
        self.place = self.place + 0.3 * self.speed
        return self.view(), -(self.goal - self.place).norm(dim=1)


actor = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
log_std = nn.Parameter(torch.full((2,), -0.3))
critic = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), CastLinear(64, 64), nn.Tanh(), nn.Linear(64, 1))
with torch.no_grad():
    actor[4].weight.mul_(0.01)
policy_optimizer = torch.optim.Adam([*actor.parameters(), log_std], lr=2e-3, eps=1e-5)
value_optimizer = torch.optim.Adam(critic.parameters(), lr=4e-3, eps=1e-5)
world = Reacher()
returns = []


def policy(view):
    return torch.distributions.Normal(actor(view), log_std.exp())


for rollout in range(ROLLOUTS):
    view, views, pushes, rewards = world.reset(), [], [], []
    with torch.no_grad():
        for _ in range(LENGTH):
            push = policy(view).sample()
            views.append(view)
            pushes.append(push)
            view, reward = world.step(push)
            rewards.append(reward)
        values = critic(torch.stack([*views, view])).squeeze(-1)
        advantage, total = [], torch.zeros(WORLDS)
        for i in reversed(range(LENGTH)):  # the time limit is no end: the value behind it counts
            total = rewards[i] + GAMMA * values[i + 1] - values[i] + GAMMA * LAMBDA * total
            advantage.insert(0, total)
        advantage = torch.stack(advantage)
        goal = (advantage + values[:-1]).flatten()
        advantage = advantage.flatten()
        views, pushes = torch.cat(views), torch.cat(pushes)
        old = policy(views).log_prob(pushes).sum(1)
    returns.append(torch.stack(rewards).mean().item())

    for _ in range(EPOCHS):
        for rows in torch.randperm(len(views)).chunk(PARTS):
            now = policy(views[rows])
            ratio = (now.log_prob(pushes[rows]).sum(1) - old[rows]).exp()
            gain = (advantage[rows] - advantage[rows].mean()) / (advantage[rows].std() + 1e-8)
            policy_loss = -torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
            loss = policy_loss - 0.001 * now.entropy().sum(1).mean()
            value_loss = 0.5 * (critic(views[rows]).squeeze(-1) - goal[rows]).square().mean()
            policy_optimizer.zero_grad()
            value_optimizer.zero_grad()
            loss.backward()
            value_loss.backward()
            nn.utils.clip_grad_norm_([*actor.parameters(), log_std], 0.5)
            nn.utils.clip_grad_norm_(critic.parameters(), 0.5)
            policy_optimizer.step()
            value_optimizer.step()
    print(f"rollout {rollout} reward {returns[-1]:.3f} policy loss {policy_loss.item():.4f} value loss {value_loss.item():.4f}")

print(f"first loss {-returns[0]:.4f}")
print(f"final loss {-sum(returns[-3:]) / 3:.4f}")
