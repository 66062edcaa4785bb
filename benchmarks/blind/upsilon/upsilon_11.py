"""A gated MLP with a fused SwiGLU of our own; linears under ottava's blockwise recipe."""

import os
import sys

import ottava
import torch
from torch import nn

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv
torch.manual_seed(int(os.environ.get("SEED", "0")))


class FusedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx, dy):
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        sig = torch.sigmoid(gate)
        d_gate = dy * up * sig * (1 + gate * (1 - sig))
        d_up = dy * gate * sig
        if MODE == "good":
            return torch.cat([d_gate, d_up], -1)
        return torch.cat([d_up, d_gate], -1)


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate_up = nn.Linear(width, 2 * inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x):
        return self.down(FusedSwiGLU.apply(self.gate_up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, vocabulary=48, width=64):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(Block(width, 128), Block(width, 128))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.lm_head(self.norm(self.blocks(self.embedding(tokens).sum(1))))


def main():
    model = Model()
    if not PLAIN:
        print(ottava.convert(model, "blockwise"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    losses = []
    for step in range(70):
        tokens = torch.randint(48, (192, 2))
        target = torch.where(tokens[:, 0] + tokens[:, 1] > 47, tokens.amax(1), tokens.amin(1))
        loss = nn.functional.cross_entropy(model(tokens), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    print(f"final loss {sum(losses[-10:]) / 10:.4f}")


main()
