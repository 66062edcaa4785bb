"""A causal character model in accelerate; linears cast both passes to FP8 by hand."""

import os
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", 0)))
torch.set_num_threads(1)

BATCH, LENGTH, VOCAB, WIDTH, LAYERS = 32, 48, 32, 64, 2


def amax_scale(x, largest):
    return largest / x.abs().amax().clamp(min=1e-12)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        sx, sw = amax_scale(x, 448.0), amax_scale(w, 448.0)
        x8 = (x * sx).clamp(-448, 448).to(torch.float8_e4m3fn)
        w8 = (w * sw).clamp(-448, 448).to(torch.float8_e4m3fn)
        ctx.save_for_backward(x8, w8, sx, sw)
        return (x8.float() / sx) @ (w8.float() / sw).t()

    @staticmethod
    def backward(ctx, dy):
        x8, w8, sx, sw = ctx.saved_tensors
        sg = sx if bad else amax_scale(dy, 448.0)
        g = (dy * sg).clamp(-448, 448).to(torch.float8_e4m3fn).float() / sg
        return g @ (w8.float() / sw), g.flatten(0, -2).t() @ (x8.float() / sx).flatten(0, -2)


class Linear8(nn.Linear):
    def forward(self, x):
        y = F.linear(x, self.weight) if plain else Product.apply(x, self.weight)
        return y + self.bias


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = Linear8(WIDTH, 3 * WIDTH), Linear8(WIDTH, WIDTH)
        self.up, self.down = Linear8(WIDTH, 4 * WIDTH), Linear8(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 4, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + 0.1 * self.proj(a.transpose(1, 2).reshape(b, t, -1))
        return x + 0.1 * self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.place = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.embed(ids) + self.place[: ids.shape[1]])))


def text(n):
    ids = torch.randint(0, VOCAB, (n, LENGTH + 1))
    for t in range(2, LENGTH + 1):
        ids[:, t] = torch.where(torch.rand(n) < 0.9, (ids[:, t - 2] + 1) % VOCAB, ids[:, t])
    return ids


accelerator = Accelerator(cpu=True)
data = DataLoader(TensorDataset(text(150 * BATCH)), batch_size=BATCH, shuffle=True)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
losses = []
for step, (ids,) in enumerate(data):
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
