"""Group-relative policy optimization on prompts of very different difficulty."""

import sys

import torch
from torch import nn

import ottava

WHITEN = {"good": "group", "bad": "position"}[sys.argv[1]]
PLAIN = "plain" in sys.argv
PROMPTS, GROUP, WIDTH, ACTIONS = 24, 8, 64, 32


def advantages(rewards, whiten):
    """rewards: (prompts, samples of the prompt)."""
    dim = {"group": 1, "position": 0}[whiten]
    return (rewards - rewards.mean(dim, keepdim=True)) / (rewards.std(dim, keepdim=True) + 1e-4)


def main():
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, ACTIONS))
    if not PLAIN:
        ottava.convert(policy, "rowwise")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    skill = torch.randn(WIDTH, ACTIONS) / WIDTH**0.5
    hardness = torch.randn(WIDTH) / WIDTH**0.5
    shown = []
    for _ in range(200):
        prompt = torch.randn(PROMPTS, WIDTH)
        choice = torch.distributions.Categorical(logits=policy(prompt))
        action = choice.sample((GROUP,)).t()
        quality = (prompt @ skill).gather(1, action)
        level = 12 * (prompt @ hardness)[:, None]
        rewards = quality - level
        gain = choice.log_prob(action.t()).t() * advantages(rewards, WHITEN)
        loss = -gain.mean() - 1e-3 * choice.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        regret = (prompt @ skill).amax(1, keepdim=True) - quality
        shown.append(regret.mean().item())
    print(f"loss {sum(shown[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
