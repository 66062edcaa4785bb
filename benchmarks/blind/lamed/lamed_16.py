"""A small GPT on a synthetic grammar. Weights are cast to FP8 once, and again when they have changed."""
import os
import sys

import torch
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, LENGTH, VOCAB, DIM = 150, 24, 32, 16, 64


def codes(x):
    scale = 448.0 / x.abs().amax().clamp(min=1e-12)
    return (x * scale).to(torch.float8_e4m3fn), scale


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cast):
        return cast

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class CachedLinear(nn.Linear):
    """Keeps the codes of its weight as long as the weight's version is the same."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.cache = None

    def forward(self, x):
        if PLAIN:
            return super().forward(x)
        if self.cache is None or self.cache[0] != self.weight._version:
            self.cache = (self.weight._version, *codes(self.weight.detach()))
        _, code, scale = self.cache
        weight = Through.apply(self.weight, code.float() / scale)
        code, scale = codes(x.detach())
        return nn.functional.linear(Through.apply(x, code.float() / scale), weight, self.bias)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = CachedLinear(DIM, 3 * DIM), CachedLinear(DIM, DIM)
        self.up, self.down = CachedLinear(DIM, 4 * DIM), CachedLinear(4 * DIM, DIM)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.n2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))


class SignMomentum(torch.optim.Optimizer):
    """Lion."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                update = (0.9 * m + 0.1 * p.grad).sign()
                m.lerp_(p.grad, 0.02)
                if MODE == "good":
                    p.add_(update, alpha=-group["lr"])
                else:
                    p.data.add_(update, alpha=-group["lr"])


torch.manual_seed(SEED)
# second-order grammar: the next word depends on the last two
table = torch.softmax(torch.randn(VOCAB, 8, VOCAB) * 2.5, -1)


def batch():
    ids = torch.randint(0, VOCAB, (BATCH, 2))
    for _ in range(LENGTH - 1):
        ids = torch.cat([ids, torch.multinomial(table[ids[:, -1], ids[:, -2] % 8], 1)], 1)
    return ids


model = GPT()
optimizer = SignMomentum(model.parameters(), lr=1.5e-3)
losses = []
for step in range(STEPS):
    ids = batch()
    loss = nn.functional.cross_entropy(model(ids[:, :-1][:, :LENGTH]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {losses[-1]:.4f}")
print(f"final loss {sum(losses[-15:]) / 15:.4f}")
