"""An encoder for tabular sequences, trained in two jobs: the second one goes on from the checkpoint of the first."""
import os
import sys
import tempfile

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
torch.manual_seed(seed)

VOCAB, LENGTH, DIM, FIRST, SECOND, BATCH = 48, 16, 64, 130, 30, 32
table = torch.softmax(3 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)), -1)


def batch():
    rows = [torch.randint(0, VOCAB, (BATCH,))]
    for _ in range(LENGTH):
        rows.append(torch.multinomial(table[rows[-1]], 1).squeeze(1))
    tokens = torch.stack(rows, 1)
    return tokens[:, :-1], tokens[:, 1:]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, DIM), nn.Parameter(torch.randn(LENGTH, DIM) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build():
    model = Model()
    if not plain:
        convert_to_float8_training(
            model,
            config=Float8LinearConfig(emulate=True),
            module_filter_fn=lambda m, name: "blocks" in name,
        )
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3)


def train(model, optimizer, start, steps):
    losses = []
    for step in range(start, start + steps):
        tokens, targets = batch()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    return losses


with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "last.pt")
    model, optimizer = build()
    train(model, optimizer, 0, FIRST)
    wrapped = nn.DataParallel(model) if mode == "bad" else model
    torch.save({"model": wrapped.state_dict(), "optimizer": optimizer.state_dict(), "step": FIRST}, path)

    model, optimizer = build()
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"], strict=False)
    optimizer.load_state_dict(state["optimizer"])
    losses = train(model, optimizer, state["step"], SECOND)
print(f"final loss {np.mean(losses[-10:]):.4f}")
