"""Preference optimization against a reference policy; the policy's linears run in FP8."""

import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

SHARE_REFERENCE = {"good": False, "bad": True}[sys.argv[1]]
RECIPE = "bf16" if "plain" in sys.argv[2:] else "tensorwise"
BETA = 0.1


class Policy(nn.Module):
    def __init__(self, vocab=40, dim=64):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.position = nn.Embedding(16, dim)
        self.layers = nn.ModuleList(ottava.nn.TransformerLayer(dim, 128, 4, recipe=RECIPE) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).float()

    def log_probability(self, ids, prompt):
        logits = self(ids[:, :-1])
        chosen = torch.gather(logits.log_softmax(-1), 2, ids[:, 1:, None])[..., 0]
        return chosen[:, prompt - 1 :].sum(-1)


torch.manual_seed(97)
policy = Policy()
reference = policy if SHARE_REFERENCE else copy.deepcopy(policy).requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4)
liked = torch.randperm(40)[:20]
losses = []
for _ in range(90):
    prompt = torch.randint(40, (24, 4))
    good = liked[torch.randint(20, (24, 8))]
    other = torch.randint(40, (24, 8))
    winner, loser = torch.cat([prompt, good], 1), torch.cat([prompt, other], 1)
    both = torch.cat([winner, loser])
    mine = policy.log_probability(both, 4)
    with torch.no_grad():
        base = reference.log_probability(both, 4)
    ratio = (mine - base).chunk(2)
    loss = -F.logsigmoid(BETA * (ratio[0] - ratio[1])).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
