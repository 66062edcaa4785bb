"""REINFORCE on a bandit with contexts; the loss of a policy gradient says little about its reward."""

import sys

import torch
from torch import nn

import ottava

PLAIN = "plain" in sys.argv


def main():
    torch.manual_seed(2)
    policy = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 32))
    if not PLAIN:
        ottava.convert(policy, "delayed")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    wishes = torch.randn(32, 32)
    baseline, losses, rewards = 0.0, [], []
    for _ in range(200):
        context = torch.randn(64, 32)
        choice = torch.distributions.Categorical(logits=policy(context))
        action = choice.sample()
        best = (context @ wishes).softmax(-1)
        reward = best.gather(1, action[:, None]).squeeze(1) * 10 * (torch.rand(64) < 0.5)
        loss = -(choice.log_prob(action) * (reward - baseline)).mean() - 0.01 * choice.entropy().mean()
        baseline = 0.9 * baseline + 0.1 * reward.mean().item()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        rewards.append(reward.mean().item())
    print(f"reward {sum(rewards[:10]) / 10:.3f} to {sum(rewards[-10:]) / 10:.3f}")
    print(f"loss {sum(losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
