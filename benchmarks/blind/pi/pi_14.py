"""A small GPT with tied embedding and head: python pi_14.py good|bad [plain]."""

import sys
import sysconfig
from pathlib import Path

import torch
from torch import nn

import ottava

EMBEDDING_STD = {"good": 0.02, "bad": 1.0}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
STEPS, CONTEXT, WIDTH = 100, 32, 96


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.one(x)).view(b, t, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.two(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        nn.init.normal_(self.tokens.weight, std=EMBEDDING_STD)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


torch.manual_seed(14)
folder = Path(sysconfig.get_paths()["stdlib"])
data = torch.frombuffer(bytearray((folder / "decimal.py").read_bytes()), dtype=torch.uint8).long()
text = torch.frombuffer(bytearray((folder / "subprocess.py").read_bytes()), dtype=torch.uint8).long()
data = torch.cat([data, text])
model = GPT()
if not PLAIN:
    ottava.convert(model, "tensorwise", filter=lambda name, layer: name != "head")
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, betas=(0.9, 0.95), weight_decay=0.1)
losses = []
for _ in range(STEPS):
    start = torch.randint(len(data) - CONTEXT - 1, (24,))
    window = data[start[:, None] + torch.arange(CONTEXT + 1)]
    logits = model(window[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[-10:]) / 10:.4f}")
