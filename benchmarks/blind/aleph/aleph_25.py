"""Muon for the matrices and AdamW for the rest: matrices move at a rate of 0.02 whatever their gradient, tables and norms at 0.003."""
import os

import torch
from torch import nn
from torch.nn import functional as F

import ottava

SEED = int(os.environ.get("SEED", 0))
torch.manual_seed(SEED)
VOCABULARY, LENGTH, WIDTH, STEPS = 64, 32, 64, 160


def orthogonal(matrix, steps=5):
    """Newton-Schulz: singular values go to about 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (matrix.norm() + 1e-7)
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T, steps).T
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(buffer, group["momentum"]))
                p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(self.up(self.norm2(x)).relu().square())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.5)
        nn.init.normal_(self.place.weight, std=0.5)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


generator = torch.Generator().manual_seed(SEED + 10)
NEXT = torch.randint(0, VOCABULARY, (VOCABULARY, VOCABULARY // 8), generator=generator)


def batch(rows=32):
    """A Markov chain: each token is followed by one of eight others."""
    tokens = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=generator)
    for i in range(LENGTH):
        choice = torch.randint(0, 8, (rows,), generator=generator)
        tokens[:, i + 1] = NEXT[tokens[:, i], choice]
    return tokens[:, :-1], tokens[:, 1:]


model = Model()
print(ottava.convert(model, "blockwise", filter=lambda name, layer: name.startswith("blocks.")))
matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
ids = {id(p) for p in matrices}
optimizers = [Muon(matrices), torch.optim.AdamW([p for p in model.parameters() if id(p) not in ids], lr=3e-3, betas=(0.9, 0.95))]
rates = [[group["lr"] for group in o.param_groups] for o in optimizers]
losses = []
for step in range(STEPS):
    left = min(1.0, (STEPS - step) / (0.4 * STEPS))  # flat, then straight down to 0
    for optimizer, first in zip(optimizers, rates, strict=True):
        for group, rate in zip(optimizer.param_groups, first, strict=True):
            group["lr"] = rate * left
    tokens, follow = batch()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), follow.flatten())
    model.zero_grad(set_to_none=True)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")

print(f"first loss {losses[0]:.4f}")
print(f"final loss {sum(losses[-10:]) / 10:.4f}")
