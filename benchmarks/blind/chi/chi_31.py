"""accelerate: a small causal transformer on a periodic token stream, with FP8 linears whose gradients are FP8, too."""
import os
import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
FP8 = torch.float8_e4m3fn


def cast(x, scaled=True):
    scale = 448.0 / x.abs().amax().clamp(min=1e-12) if scaled else torch.ones(())
    return (x * scale).clamp(-448, 448).to(FP8), scale


class Matmul8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        (xq, xs), (wq, ws) = cast(x), cast(w)
        ctx.save_for_backward(xq, xs, wq, ws)
        return (xq.float() @ wq.float().t()) / (xs * ws)

    @staticmethod
    def backward(ctx, g):
        xq, xs, wq, ws = ctx.saved_tensors
        gq, gs = cast(g, scaled=MODE == "good")
        dx = gq.float() @ wq.float() / (gs * ws)
        dw = gq.float().flatten(0, -2).t() @ xq.float().flatten(0, -2) / (gs * xs)
        return dx, dw


class Linear(nn.Linear):
    def forward(self, x):
        y = super().forward(x) if PLAIN else Matmul8.apply(x, self.weight) + self.bias
        return y


class Block(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.heads, self.n1, self.n2 = heads, nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = Linear(d, 3 * d), Linear(d, d)
        self.up, self.down = Linear(d, 4 * d), Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Model(nn.Module):
    def __init__(self, vocab=64, d=64, t=32):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, d), nn.Parameter(0.02 * torch.randn(t, d))
        self.blocks = nn.Sequential(Block(d), Block(d))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.emb(ids) + self.pos)))


torch.manual_seed(SEED)
g = torch.Generator().manual_seed(30 + SEED)
start, stride = torch.randint(0, 64, (2560, 1), generator=g), torch.randint(1, 9, (2560, 1), generator=g)
tokens = (start + stride * torch.arange(33)) % 64
accelerator = Accelerator(cpu=True)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(tokens), batch_size=32))
losses = []
for epoch in range(2):
    for (ids,) in loader:
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
print("final loss", round(sum(losses[-15:]) / 15, 4))
