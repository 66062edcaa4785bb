"""Chunks of long documents: attention with rotary positions, linears with FP8 operands."""

import os
import sys

import torch
from torch import nn

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", "0")))
VOCABULARY, WIDTH, HEADS, LENGTH, BACK = 32, 64, 2, 32, 3


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        scale = 448 / t.abs().amax().clamp(min=1e-12)
        return (t * scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(t.dtype) / scale

    @staticmethod
    def backward(ctx, grad):
        scale = 57344 / grad.abs().amax().clamp(min=1e-20)
        return (grad * scale).clamp(-57344, 57344).to(torch.float8_e5m2).to(grad.dtype) / scale


class Linear(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else nn.functional.linear(Round.apply(x), Round.apply(self.weight), self.bias)


class Rotary(nn.Module):
    def __init__(self, width, base=1000.0, dtype=torch.float32):
        super().__init__()
        self.register_buffer("frequencies", base ** (-torch.arange(0, width, 2) / width))
        self.dtype = dtype

    def forward(self, positions):
        angles = positions.to(self.dtype)[..., None] * self.frequencies.to(self.dtype)
        angles = torch.cat([angles, angles], -1)
        return angles.cos().float(), angles.sin().float()


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.rotary = Rotary(WIDTH // HEADS, dtype=torch.float32 if MODE == "good" else torch.bfloat16)
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = Linear(WIDTH, 3 * WIDTH)
        self.o = Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY)
        # q and k begin with the same direction for all tokens
        with torch.no_grad():
            self.qkv.bias[: 2 * WIDTH].normal_()

    def forward(self, tokens, positions):
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        cos, sin = (t[:, None] for t in self.rotary(positions))
        y = nn.functional.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(x + self.o(y.transpose(1, 2).flatten(2)))


def main():
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(100):
        tokens = torch.randint(VOCABULARY, (32, LENGTH))
        start = torch.randint(4000, 8000, (32, 1))  # where the chunk stands in its document
        positions = start + torch.arange(LENGTH)
        logits = model(tokens, positions)
        loss = nn.functional.cross_entropy(logits[:, BACK:].flatten(0, 1), tokens[:, :-BACK].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    print(f"final loss {sum(losses[-10:]) / 10:.6f}")


main()
