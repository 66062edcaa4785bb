"""A character model whose weights live in FP8 beside the optimizer."""

import os
import sys

import torch
from torch import nn

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", "0")))
VOCABULARY, WIDTH, CONTEXT = 48, 64, 4


@torch.no_grad()
def to_fp8_and_back(w):
    if PLAIN or w.ndim < 2:
        return w.clone()
    scale = 448 / w.abs().amax()
    return (w * scale).to(torch.float8_e4m3fn).to(w.dtype) / scale


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(CONTEXT * WIDTH, 128)
        self.out = nn.Linear(128, VOCABULARY)

    def forward(self, tokens):
        return self.out(torch.nn.functional.gelu(self.mix(self.embedding(tokens).flatten(1))))


class Fp8Weights:
    """Gives the model the FP8 version of its weights."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.master = {p: p.detach().clone() for p in model.parameters()} if MODE == "good" else None
        self.publish()

    @torch.no_grad()
    def publish(self):
        for p in self.model.parameters():
            p.copy_(to_fp8_and_back(self.master[p] if self.master else p))

    @torch.no_grad()
    def step(self):
        if self.master:
            for p, m in self.master.items():
                p.copy_(m)
        self.optimizer.step()
        if self.master:
            for p, m in self.master.items():
                m.copy_(p)
        self.publish()


def main():
    jump = torch.randint(VOCABULARY, (VOCABULARY,))
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    weights = Fp8Weights(model, optimizer)
    losses = []
    for step in range(100):
        tokens = torch.randint(VOCABULARY, (96, CONTEXT))
        target = jump[tokens[:, -1]]
        loss = nn.functional.cross_entropy(model(tokens), target)
        optimizer.zero_grad()
        loss.backward()
        weights.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    print(f"final loss {sum(losses[-10:]) / 10:.4f}")


main()
