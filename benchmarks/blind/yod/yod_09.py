"""ReLoRA: after a warm start only adapters of rank 4 learn; every 40 steps they are added to the weights and begin anew.

    python yod_09.py good

At each merge the optimizer forgets its moments and the rate warms up again.
"""

import os

import torch
import torch.nn.functional as F
from torch import nn

import ottava

SEED = int(os.environ.get("SEED", "0"))
WORDS, DIM, LENGTH, BATCH, WARM, CYCLE, CYCLES, RANK = 48, 64, 24, 32, 50, 40, 4, 4


class Adapted(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False)
        self.a = nn.Parameter(torch.empty(RANK, inputs), requires_grad=False)
        self.b = nn.Parameter(torch.zeros(outputs, RANK), requires_grad=False)
        nn.init.kaiming_uniform_(self.a, a=5**0.5)

    def forward(self, x):
        return self.base(x) + 2.0 * F.linear(F.linear(x, self.a), self.b)

    @torch.no_grad()
    def merge(self):
        self.base.weight += 2.0 * self.b @ self.a
        nn.init.kaiming_uniform_(self.a, a=5**0.5)
        self.b.zero_()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = Adapted(DIM, 3 * DIM), Adapted(DIM, DIM)
        self.up, self.down = Adapted(DIM, 4 * DIM), Adapted(4 * DIM, DIM)

    def forward(self, x):
        q, k, v = (t.view(*t.shape[:2], 4, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, DIM), nn.Embedding(LENGTH, DIM)
        nn.init.normal_(self.words.weight, std=0.05)
        nn.init.normal_(self.places.weight, std=0.05)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(DIM)

    def forward(self, rows):
        x = self.words(rows) + self.places.weight[: rows.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.words.weight)  # tied


def texts(table, count, generator):
    """The next word hangs on the last two, with one of three followers."""
    rows = [torch.randint(WORDS, (count,), generator=generator) for _ in range(2)]
    for _ in range(LENGTH - 1):
        draw = torch.multinomial(torch.tensor([0.8, 0.15, 0.05]), count, replacement=True, generator=generator)
        rows.append(table[rows[-1], rows[-2] % 4, draw])
    return torch.stack(rows, 1)


def main():
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(321 + SEED)
    table = torch.randint(WORDS, (WORDS, 4, 3), generator=generator)
    held = texts(table, 256, generator)
    model = Decoder()
    ottava.convert(model, "tensorwise_e4m3")
    adapted = [m for m in model.modules() if isinstance(m, Adapted)]

    def loss_of(rows):
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    def evaluate():
        with torch.no_grad():
            return loss_of(held).item()

    def train(steps, rate):
        learning = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(learning, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 8, 1.0 - 0.7 * s / steps))
        for step in range(steps):
            loss = loss_of(texts(table, BATCH, generator))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % 20 == 0:
                print(f"loss {loss.item():.4f}")

    print(f"first loss {evaluate():.4f}")
    train(WARM, 4e-3)
    print(f"after the warm start {evaluate():.4f}")
    for layer in adapted:
        layer.base.weight.requires_grad_(False)
        layer.a.requires_grad_(True)
        layer.b.requires_grad_(True)
    for cycle in range(CYCLES):
        train(CYCLE, 8e-3)
        for layer in adapted:
            layer.merge()
        print(f"cycle {cycle} held-out {evaluate():.4f}")
    print(f"final loss {evaluate():.4f}")


main()
