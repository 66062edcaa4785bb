"""NVFP4 with random Hadamard transforms in the middle; the first and the last layer stay in high precision. The data change their mix half-way."""
import sys

import torch
from torch import nn

import ottava

PLAIN = "plain" in sys.argv[2:]
torch.manual_seed(20)
width, vocab = 128, 96


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


model = nn.Sequential(nn.Embedding(vocab, 64), nn.Flatten(1), nn.Linear(128, width), Block(), Block(), nn.RMSNorm(width), nn.Linear(width, vocab))
if not PLAIN:
    recipe = ottava.get_recipe("nvfp4_rht")
    ottava.convert(model, recipe, filter=lambda name, layer: name[0] in "34")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
easy, hard = torch.randint(vocab, (vocab,)), torch.randint(vocab, (vocab, vocab))
losses = []
for step in range(120):
    ids = torch.randint(vocab, (192, 2))
    share = 0.1 if step < 60 else 0.5
    labels = torch.where(torch.rand(192) < share, hard[ids[:, 0] // 8, ids[:, 1] // 8], easy[ids[:, 1]])
    loss = nn.functional.cross_entropy(model(ids), labels)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
print(f"first {losses[0]:.4f}")
print(f"loss {sum(losses[-10:]) / 10:.4f}")
