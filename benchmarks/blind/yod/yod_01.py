"""Context extension of a small decoder: rows of 32 words first, then rows of 128 with a larger base of the rotary angles.

    python yod_01.py good

Each text follows one of eight tables of followers, so a longer text shows better which one it is.
"""

import math
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ottava

SEED = int(os.environ.get("SEED", "0"))
WORDS, DIM, HEADS, TABLES = 32, 64, 4, 8


def rotate(x, base):
    half = x.shape[-1] // 2
    speeds = base ** (-torch.arange(half) / half)
    angles = torch.arange(x.shape[-2])[:, None] * speeds
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x, base):
        q, k, v = (t.view(*t.shape[:2], HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(rotate(q, base), rotate(k, base), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, DIM)
        nn.init.normal_(self.words.weight, std=0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, WORDS, bias=False)
        self.base = 50.0

    def forward(self, rows):
        x = self.words(rows)
        for block in self.blocks:
            if self.training and rows.shape[1] > 64:  # long rows: compute again rather than keep
                x = checkpoint(block, x, self.base, use_reentrant=False)
            else:
                x = block(x, self.base)
        return self.head(self.norm(x))


def texts(tables, count, length, generator):
    kind = torch.randint(TABLES, (count,), generator=generator)
    rows = [torch.randint(WORDS, (count,), generator=generator)]
    for _ in range(length):
        rows.append(torch.multinomial(tables[kind, rows[-1]], 1, generator=generator)[:, 0])
    return torch.stack(rows, 1)


def loss_of(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def evaluate(model, rows):
    model.eval()
    with torch.no_grad():
        value = loss_of(model, rows).item()
    model.train()
    return value


def main():
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(1000 + SEED)
    tables = torch.softmax(3.0 * torch.randn(TABLES, WORDS, WORDS, generator=generator), -1)
    held = texts(tables, 32, 128, generator)
    model = Decoder()
    print(ottava.convert(model, "tensorwise"))
    print(f"first loss {evaluate(model, held):.4f}")
    step = 0
    for length, count, base, steps, rate in ((32, 32, 50.0, 110, 4e-3), (128, 8, 5000.0, 80, 2e-3)):
        model.base = base  # larger angles would be new to the model; with a larger base far words turn less
        print(f"rows of {length}, base {base}: {evaluate(model, held):.4f}")
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda s, n=steps: min(1.0, (s + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * s / n))
        )
        for _ in range(steps):
            loss = loss_of(model, texts(tables, count, length, generator))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step += 1
            if step % 20 == 0:
                print(f"step {step} loss {loss.item():.4f}")
    print(f"final loss {evaluate(model, held):.4f}")


main()
