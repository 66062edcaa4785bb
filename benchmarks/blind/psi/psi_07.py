"""Actor and critic learn to steer a point to its goal; the value loss grows with the returns."""
import os
import sys

import torch
import torch.nn as nn

mode, plain = sys.argv[1], "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
ENVS, HORIZON, STEPS, GAMMA = 64, 20, 120, 0.97

MOVES = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0], [0.0, 0.0]]) * 0.25


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.policy, self.value = nn.Linear(64, 5), nn.Linear(64, 1)

    def forward(self, state):
        h = self.body(state)
        return torch.distributions.Categorical(logits=self.policy(h)), self.value(h).squeeze(-1)


def reset(n):
    return torch.rand(n, 2) * 2 - 1, torch.rand(n, 2) * 2 - 1


agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
place, goal = reset(ENVS)
losses, rewards_seen = [], []
for step in range(STEPS):
    logps, values, rewards, dones, entropies = [], [], [], [], []
    for _ in range(HORIZON):
        dist, value = agent(torch.cat([place, goal], -1))
        action = dist.sample()
        place = (place + MOVES[action] + 0.02 * torch.randn(ENVS, 2)).clamp(-1.5, 1.5)
        near = (place - goal).norm(dim=-1) < 0.2
        reward = -0.05 + 5.0 * near.float()
        logps.append(dist.log_prob(action))
        entropies.append(dist.entropy())
        values.append(value)
        rewards.append(reward)
        dones.append(near.float())
        new_place, new_goal = reset(ENVS)
        place = torch.where(near[:, None], new_place, place)
        goal = torch.where(near[:, None], new_goal, goal)
    with torch.no_grad():
        _, running = agent(torch.cat([place, goal], -1))
        returns = []
        for r, d in zip(reversed(rewards), reversed(dones)):
            running = r + GAMMA * (1 - d) * running
            returns.append(running)
        returns = torch.stack(returns[::-1])
    values, logps = torch.stack(values), torch.stack(logps)
    advantage = returns - values.detach()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    loss = -(logps * advantage).mean() + 0.5 * (returns - values).square().mean()
    loss = loss - 0.01 * torch.stack(entropies).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    rewards_seen.append(torch.stack(rewards).mean().item())
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f} reward {rewards_seen[-1]:.4f}")
print(f"reward {sum(rewards_seen[-20:]) / 20:.4f}")
print(f"final loss {sum(losses[-20:]) / 20:.4f}")
