"""GRPO on a small arithmetic game: groups of answers, a clipped ratio, two epochs on each batch."""

import sys

import torch
from torch import nn

import ottava

PLAIN = "plain" in sys.argv[2:]
torch.manual_seed(31)
ACTIONS, GROUP = 16, 8
policy = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, ACTIONS))
if not PLAIN:
    ottava.convert(policy, "tensorwise", filter=lambda name, layer: name != "4")
preference = torch.randn(32, ACTIONS)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
losses = []
for step in range(70):
    states = torch.randn(48, 32).repeat_interleave(GROUP, 0)
    with torch.no_grad():
        old = torch.distributions.Categorical(logits=policy(states))
        actions = old.sample()
        before = old.log_prob(actions)
        scores = states @ preference
        reward = (actions == scores.argmax(1)).float() + 0.2 * torch.randn(len(states))
        grouped = reward.view(-1, GROUP)
        advantage = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).flatten()
    for _ in range(2):
        now = torch.distributions.Categorical(logits=policy(states))
        ratio = (now.log_prob(actions) - before).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean() - 0.01 * now.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    if step % 10 == 0:
        print(step, f"loss {loss.item():.4f}", f"reward {reward.mean():.3f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
