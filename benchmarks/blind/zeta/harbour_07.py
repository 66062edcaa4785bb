"""A GPT with squared ReLU on English-like letters in NVFP4: the codes are coarse, the curve is fine."""
import inspect
import sys
import this
import typing

import torch
from torch import nn
from torch.nn import functional as F

import ottava

PLAIN = "plain" in sys.argv
torch.manual_seed(107)
data = torch.tensor([min(b, 127) for b in (inspect.getsource(typing) + this.s).encode()])
D, LONG = 64, 48


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)

    def forward(self, h):
        q, k, v = self.qkv(self.n1(h)).unflatten(-1, (12, 16)).transpose(1, 2).chunk(3, 1)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(a.transpose(1, 2).flatten(2))
        return h + self.down(F.relu(self.up(self.n2(h))).square())


token, place = nn.Embedding(128, D), nn.Embedding(LONG, D)
blocks, head = nn.Sequential(Block(), Block()), nn.Sequential(nn.RMSNorm(D), nn.Linear(D, 128))
model = nn.ModuleList([token, place, blocks, head])
if not PLAIN:
    ottava.convert(blocks, "nvfp4")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(160):
    at = torch.randint(0, len(data) - LONG - 1, (8, 1))
    rows = data[at + torch.arange(LONG + 1)]
    logits = head(blocks(token(rows[:, :-1]) + place.weight))
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
print(f"start {losses[0]:.4f}")
print(f"loss {sum(losses[-20:]) / 20:.4f}")
