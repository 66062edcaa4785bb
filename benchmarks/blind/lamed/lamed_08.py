"""A small GPT copies and reverses strings; they get longer twice. Casts by hand, current scales."""
import os
import sys

import torch
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, VOCAB, DIM = 150, 32, 20, 64
STAGES = {0: 3, 50: 5, 100: 8}


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        scale = 448.0 / x.abs().amax().clamp(min=1e-12)
        return (x * scale).to(torch.float8_e4m3fn).float() / scale

    @staticmethod
    def backward(ctx, grad):
        scale = 57344.0 / grad.abs().amax().clamp(min=1e-30)
        return (grad * scale).to(torch.float8_e5m2).float() / scale


class Linear(nn.Linear):
    def forward(self, x):
        if PLAIN:
            return super().forward(x)
        return nn.functional.linear(Cast.apply(x), Cast.apply(self.weight), self.bias)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = Linear(DIM, 3 * DIM), Linear(DIM, DIM)
        self.up, self.down = Linear(DIM, 128), Linear(128, DIM)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.n2(x))))


torch.manual_seed(SEED)
embed, place = nn.Embedding(VOCAB + 1, DIM), nn.Embedding(20, DIM)
net = nn.Sequential(Block(), Block(), nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB))
optimizer = torch.optim.AdamW([*embed.parameters(), *place.parameters(), *net.parameters()], lr=3e-3)
losses, length = [], 0
for step in range(STEPS):
    length = STAGES.get(step, length)
    word = torch.randint(0, VOCAB, (BATCH, length))
    ids = torch.cat([word, torch.full((BATCH, 1), VOCAB), word.flip(1)], 1)
    scores = net(embed(ids[:, :-1]) + place(torch.arange(ids.shape[1] - 1)))[:, length:]
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), word.flip(1).flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_([*embed.parameters(), *place.parameters(), *net.parameters()], 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step} length {length} loss {losses[-1]:.4f}")
print(f"final loss {sum(losses[-15:]) / 15:.4f}")
