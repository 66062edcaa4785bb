"""Actor and critic (A2C) that balance a pole, written by hand with 32 poles at a time.

Poles that stand longer have larger returns, so the critic's loss grows again after it had fallen, while the policy
gets better.
"""

import math
import os

import torch
from torch import nn
from torch.nn import functional as F

import ottava

SEED = int(os.environ.get("SEED", "0"))
POLES, TICKS, STEPS, GAMMA = 32, 10, 260, 0.98


class Poles:
    """The usual equations of a cart with a pole; a fallen pole begins anew."""

    def __init__(self, number, generator):
        self.generator = generator
        self.state = self.fresh(number)

    def fresh(self, number):
        return 0.1 * torch.rand(number, 4, generator=self.generator) - 0.05

    def step(self, action):
        x, v, angle, spin = self.state.T
        force = 20.0 * action - 10
        part = (force + 0.05 * spin**2 * angle.sin()) / 1.1
        turn = (9.8 * angle.sin() - angle.cos() * part) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        push = part - 0.05 * turn * angle.cos() / 1.1
        self.state = torch.stack([x + 0.02 * v, v + 0.02 * push, angle + 0.02 * spin, spin + 0.02 * turn], 1)
        fallen = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 12 * math.pi / 180)
        self.state = torch.where(fallen[:, None], self.fresh(len(fallen)), self.state)
        return fallen


class Agent(nn.Module):
    """One body, two heads."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.policy, self.value = nn.Linear(64, 2), nn.Linear(64, 1)

    def forward(self, state):
        h = self.body(state * torch.tensor([1.0, 1.0, 8.0, 2.0]))
        return self.policy(h), self.value(h).squeeze(-1)


@torch.no_grad()
def evaluate(agent, ticks=200):
    """The share of ticks at which one of 64 poles falls, in percent."""
    poles = Poles(64, torch.Generator().manual_seed(9))
    fallen = sum(poles.step(agent(poles.state)[0].argmax(-1).float()).sum().item() for _ in range(ticks))
    return 100 * fallen / (64 * ticks)


def main():
    torch.manual_seed(SEED)
    agent = Agent()
    print(ottava.convert(agent, "guarded"))
    optimizer = torch.optim.RMSprop(agent.parameters(), 1e-3, alpha=0.99, eps=1e-5)
    poles = Poles(POLES, torch.Generator().manual_seed(SEED))
    print("first loss", round(evaluate(agent), 4))
    for step in range(STEPS):
        states, actions, ends = [], [], []
        with torch.no_grad():
            for _ in range(TICKS):
                states.append(poles.state)
                actions.append(torch.distributions.Categorical(logits=agent(poles.state)[0]).sample())
                ends.append(poles.step(actions[-1].float()))
            later = agent(poles.state)[1]
        returns = []
        for end in reversed(ends):
            later = 0.1 + GAMMA * later * (~end)
            returns.append(later)
        returns = torch.stack(returns[::-1]).flatten()
        logits, values = agent(torch.cat(states))
        chances = logits.log_softmax(-1)
        better = returns - values.detach()
        better = (better - better.mean()) / (better.std() + 1e-6)
        policy = -(chances.gather(1, torch.cat(actions)[:, None]).squeeze(1) * better).mean()
        critic = F.mse_loss(values, returns)
        surprise = -(chances.exp() * chances).sum(-1).mean()
        loss = policy + 0.5 * critic - 0.01 * surprise
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        if step % 20 == 0:
            print(step, "policy", round(policy.item(), 4), "critic", round(critic.item(), 4), "falls", evaluate(agent))
    print("final loss", round(evaluate(agent), 4))


if __name__ == "__main__":
    main()
