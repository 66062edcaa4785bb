"""A GPT from scratch on letters, in plain torch."""

import math
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

import ottava

SEED = int(os.environ.get("SEED", "0"))
MODE = sys.argv[1]
torch.manual_seed(SEED)
VOCAB, LENGTH, WIDTH, HEADS, LAYERS, STEPS = 64, 48, 64, 4, 2, 140


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc, self.fc_out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, HEADS, -1).transpose(1, 2) for z in self.qkv(self.ln_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.fc_out(F.gelu(self.fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.apply(self.init)

    def init(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


g = torch.Generator().manual_seed(22)
table = (torch.randn(VOCAB, VOCAB, generator=g) * 2.2).softmax(-1)
text = torch.randint(0, VOCAB, (40, 1))
for _ in range(1200):
    text = torch.cat([text, torch.multinomial(table[text[:, -1]], 1)], 1)


def batch(rows, size=16):
    r = rows[torch.randint(0, len(rows), (size,))]
    starts = torch.randint(0, r.shape[1] - LENGTH - 1, (size,))
    ids = torch.stack([row[s : s + LENGTH + 1] for row, s in zip(r, starts)])
    return ids[:, :-1], ids[:, 1:]


def learning_rate(step, top=3e-3, warmup=15):
    if step < warmup:
        return top * (step + 1) / warmup
    return top * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (STEPS - warmup))))


model = GPT()
if "plain" not in sys.argv[2:]:
    ottava.convert(model, "delayed")
decay = [p for p in model.parameters() if p.dim() > 1]
rest = [p for p in model.parameters() if p.dim() <= 1]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
for step in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
    x, y = batch(text[:32])
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f} lr {learning_rate(step):.2e}")
model.eval()
with torch.no_grad():
    x, y = batch(text[32:], 64)
    print(f"final loss {F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item():.4f}")
