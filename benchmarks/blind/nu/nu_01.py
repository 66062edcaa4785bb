"""Small decoder on packed documents: every document repeats its own key after each query token."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

DOCUMENT_MASK = {"good": True, "bad": False}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
VOCAB, LENGTH, DIM, HEADS, QUERY = 34, 64, 64, 4, 33


def pack(batch, generator):
    tokens = torch.randint(1, 33, (batch, LENGTH), generator=generator)
    ids = torch.zeros(batch, LENGTH, dtype=torch.long)
    positions = torch.zeros(batch, LENGTH, dtype=torch.long)
    labels = torch.full((batch, LENGTH), -100)
    for b in range(batch):
        start, doc = 0, 0
        while start < LENGTH:
            size = min(int(torch.randint(6, 14, (1,), generator=generator)), LENGTH - start)
            ids[b, start : start + size] = doc
            positions[b, start : start + size] = torch.arange(size)
            for q in range(start + 2, start + size, 2):
                tokens[b, q] = QUERY
                labels[b, q] = tokens[b, start]
            start, doc = start + size, doc + 1
    return tokens, positions, ids, labels


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x, mask):
        b, s, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, s, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        x = x + self.out(a.transpose(1, 2).reshape(b, s, DIM))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, tokens, positions, mask):
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


torch.manual_seed(0)
model = Decoder()
if not PLAIN:
    ottava.convert(model, "tensorwise")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
generator = torch.Generator().manual_seed(1)
causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
losses = []
for _step in range(130):
    tokens, positions, ids, labels = pack(16, generator)
    mask = causal.expand(16, -1, -1)
    if DOCUMENT_MASK:
        mask = mask & (ids[:, :, None] == ids[:, None, :])
    logits = model(tokens, positions, mask)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
