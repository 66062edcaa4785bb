"""Documents of 5 to 40 tokens packed into rows of 64, no document sees another, blocks are computed again for backward; tied tables."""
import os

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ottava

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
VOCABULARY, LENGTH, WIDTH, HEADS, ROWS, STEPS = 48, 64, 64, 4, 10, 120
START = 0


def document():
    """A start token, a key, and an arithmetic progression with that key; counts modulo the size of the vocabulary."""
    size = int(torch.randint(5, 41, ()))
    first, key = torch.randint(1, VOCABULARY, (2,))
    key = key % 6 + 1
    body = (first + key * torch.arange(size - 2)) % (VOCABULARY - 1) + 1
    return torch.cat([torch.tensor([START]), key[None], body])


def packed_row():
    """Tokens, the number of the document of each, and the place in it. The tail that no document fits is padding (-1)."""
    tokens = torch.zeros(LENGTH + 1, dtype=torch.long)
    owner, place = torch.full((LENGTH + 1,), -1), torch.zeros(LENGTH + 1, dtype=torch.long)
    at = number = 0
    while True:
        text = document()
        if at + len(text) > LENGTH + 1:
            return tokens, owner, place
        span = slice(at, at + len(text))
        tokens[span], owner[span], place[span] = text, number, torch.arange(len(text))
        at, number = at + len(text), number + 1


def batch(rows=ROWS):
    tokens, owner, place = (torch.stack(c) for c in zip(*(packed_row() for _ in range(rows)), strict=True))
    goal = tokens[:, 1:].clone()
    # no loss across a border, none on the padding, and none where a key or the first number is drawn at random
    goal[(owner[:, 1:] != owner[:, :-1]) | (owner[:, 1:] < 0) | (place[:, 1:] < 3)] = -100
    return tokens[:, :-1], owner[:, :-1], place[:, :-1], goal


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, mask):
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(41, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.1)
        nn.init.normal_(self.place.weight, std=0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens, owner, place):
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        mask = ((owner[:, :, None] == owner[:, None, :]) & causal)[:, None]
        x = self.embed(tokens) + self.place(place)
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False)
        return F.linear(self.norm(x), self.embed.weight)


model = Model()
print(ottava.convert(model, "rowwise", filter=lambda name, layer: "blocks" in name))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05)
losses = []
for step in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = 3e-3 * min(1.0, (step + 1) / 15, (STEPS - step) / 40)
    tokens, owner, place, goal = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(tokens, owner, place)
    loss = F.cross_entropy(out.float().flatten(0, 1), goal.flatten(), ignore_index=-100)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 15 == 0:
        print(f"step {step} loss {loss.item():.4f} over {int((goal != -100).sum())} tokens")

print(f"first loss {losses[0]:.4f}")
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
