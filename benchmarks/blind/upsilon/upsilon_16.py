"""Actor and critic on a small corridor: a surrogate loss that changes its sign and says little."""

import os
import sys

import torch
from torch import nn

MODE = sys.argv[1]
torch.manual_seed(int(os.environ.get("SEED", "0")))
STATES, HORIZON, ENVS = 16, 24, 32


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(STATES, 64), nn.Linear(64, 64), nn.Tanh())
        self.policy = nn.Linear(64, 2)
        self.value = nn.Linear(64, 1)

    def forward(self, state):
        x = self.body(state)
        return torch.distributions.Categorical(logits=self.policy(x)), self.value(x)[..., 0]


def main():
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    returns = []
    for update in range(80):
        state = torch.randint(4, (ENVS,))
        logs, values, rewards, entropies = [], [], [], []
        for _ in range(HORIZON):
            policy, value = model(state)
            action = policy.sample()
            state = (state + 2 * action - 1).clamp(0, STATES - 1)
            goal = state == STATES - 1
            rewards.append(goal.float())
            logs.append(policy.log_prob(action))
            values.append(value)
            entropies.append(policy.entropy())
            state = torch.where(goal, torch.zeros_like(state), state)
        total, targets = torch.zeros(ENVS), []
        for reward in reversed(rewards):
            total = reward + 0.97 * total
            targets.append(total)
        targets, values = torch.stack(targets[::-1]), torch.stack(values)
        advantage = (targets - values).detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-3)
        surrogate = -(torch.stack(logs) * advantage).mean()
        loss = surrogate + 0.5 * (values - targets).square().mean() - 0.005 * torch.stack(entropies).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        returns.append(torch.stack(rewards).sum(0).mean().item())
        if update % 10 == 0:
            print(f"update {update} loss {loss.item():+.4f} return {returns[-1]:.3f}")
    # goals missed, of the one that fits into an episode
    print(f"final loss {1 - min(sum(returns[-10:]) / 10, 1):.4f}")


main()
