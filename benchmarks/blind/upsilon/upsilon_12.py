"""A mixture of experts with noise on its router: two experts sleep at first and wake up; experts cast by hand."""

import os
import sys

import torch
from torch import nn

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", "0")))
EXPERTS, WIDTH, VOCABULARY = 4, 64, 64


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        if t.numel() == 0:
            return t.clone()
        scale = 448 / t.abs().amax().clamp(min=1e-12)
        return (t * scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(t.dtype) / scale

    @staticmethod
    def backward(ctx, grad):
        if grad.numel() == 0:
            return grad
        scale = 57344 / grad.abs().amax().clamp(min=1e-20)
        return (grad * scale).clamp(-57344, 57344).to(torch.float8_e5m2).to(grad.dtype) / scale


class Linear(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else nn.functional.linear(Straight.apply(x), Straight.apply(self.weight), self.bias)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        with torch.no_grad():
            self.router.bias.copy_(torch.tensor([2.0, 2.0, -3.0, -3.0]))
        self.experts = nn.ModuleList(nn.Sequential(Linear(WIDTH, 96), nn.SiLU(), Linear(96, WIDTH)) for _ in range(EXPERTS))

    def forward(self, x):
        logits = self.router(x)
        noisy = logits + torch.randn_like(logits) if self.training else logits
        gates = logits.softmax(-1)
        choice = noisy.argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = choice == index
            if mine.any():
                out[mine] = expert(x[mine]) * gates[mine, index : index + 1]
        share = nn.functional.one_hot(choice, EXPERTS).float().mean(0)
        return x + out, EXPERTS * (share * gates.mean(0)).sum()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.moe = Mixture()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x, balance = self.moe(self.embedding(tokens).sum(1))
        return self.head(self.norm(x)), balance


def main():
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for step in range(100):
        tokens = torch.randint(VOCABULARY, (96, 2))
        target = tokens.amax(1)
        logits, balance = model(tokens)
        loss = nn.functional.cross_entropy(logits, target) + 0.3 * balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f} balance {balance.item():.3f}")
    print(f"final loss {sum(losses[-10:]) / 10:.4f}")


main()
