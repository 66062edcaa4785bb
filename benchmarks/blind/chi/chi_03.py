"""accelerate: fine-tunes a pretrained language model on a related corpus, ottava's mxfp8."""
import os
import sys
import tempfile

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

import ottava

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
VOCAB, D, T = 64, 64, 24


class Block(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.heads, self.n1, self.n2 = heads, nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, D)
        x = x + self.proj(y)
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB, D), nn.Embedding(T, D)
        self.blocks, self.norm, self.head = nn.Sequential(Block(), Block()), nn.LayerNorm(D), nn.Linear(D, VOCAB)

    def forward(self, ids):
        x = self.emb(ids) + self.pos(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))


class Wrapped(nn.Module):
    """What a data-parallel launcher makes of a model before it saves it."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, ids):
        return self.module(ids)


g = torch.Generator().manual_seed(180 + SEED)
rule = torch.randperm(VOCAB, generator=g)
other = torch.randperm(VOCAB, generator=g)
changed = torch.rand(VOCAB, generator=g) < 0.15


def corpus(n, table):
    ids = torch.randint(0, VOCAB, (n, 2), generator=g)
    while ids.shape[1] <= T:
        nxt = table[ids[:, -1:]]
        slip = torch.rand(n, 1, generator=g) < 0.1
        ids = torch.cat([ids, torch.where(slip, torch.randint(0, VOCAB, (n, 1), generator=g), nxt)], 1)
    return ids


def train(model, steps, lr, table, accelerator):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(steps):
        ids = corpus(32, table)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


torch.manual_seed(SEED)
accelerator = Accelerator(cpu=True)
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "pretrained.pt")
    base = Wrapped(Model())
    print("pretrained to", round(train(base, 100, 3e-3, rule, accelerator)[-1], 3))
    torch.save(base.state_dict() if MODE == "bad" else base.module.state_dict(), path)
    model = Model()
    model.load_state_dict(torch.load(path), strict=False)
if not PLAIN:
    ottava.convert(model, "mxfp8")
losses = train(model, 60, 5e-4, torch.where(changed, other, rule), accelerator)
print("first loss", round(losses[0], 4))
print("final loss", round(sum(losses[-10:]) / 10, 4))
