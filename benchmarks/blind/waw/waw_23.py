"""A discrete autoencoder by Gumbel-softmax: eight codes of eight values, drawn with noise at a temperature that falls
from 2 to 0.4.

What is trained is a soft mixture, what counts are hard codes. The entropy of the codes gets a small reward that
fades. Operands of linears are cast to FP8 by hand, in blocks of 32.
"""

import math
import os

import torch
from torch import nn
from torch.nn import functional as F

SEED = int(os.environ.get("SEED", "0"))
INPUTS, CODES, VALUES, STEPS = 48, 8, 8, 240


def blocks(x, kind):
    """FP8 there and back, with a power of two for each 32 numbers of a row."""
    parts = x.unflatten(-1, (-1, 32))
    scale = 2.0 ** (math.log2(torch.finfo(kind).max) - parts.abs().amax(-1, keepdim=True).clamp(min=1e-20).log2()).floor()
    return ((parts * scale).to(kind).to(x.dtype) / scale).flatten(-2)


class Round(torch.autograd.Function):
    """E4M3 forward; the gradient goes through as E5M2."""

    @staticmethod
    def forward(ctx, x):
        return blocks(x, torch.float8_e4m3fn)

    @staticmethod
    def backward(ctx, dy):
        return blocks(dy, torch.float8_e5m2)


class Layer(nn.Linear):
    """A linear whose operands are cast; the weight's own gradient stays in FP32."""

    def forward(self, x):
        return F.linear(Round.apply(x), self.weight + (blocks(self.weight, torch.float8_e4m3fn) - self.weight).detach(), self.bias)


class Coder(nn.Module):
    """Encoder, codes, decoder."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(INPUTS, 128), nn.SiLU(), Layer(128, CODES * VALUES))
        self.decoder = nn.Sequential(Layer(CODES * VALUES, 128), nn.SiLU(), Layer(128, 128), nn.SiLU(), nn.Linear(128, INPUTS))

    def forward(self, x, temperature):
        logits = self.encoder(x).view(-1, CODES, VALUES)
        if self.training:
            codes = F.gumbel_softmax(logits, tau=temperature, hard=False)
        else:
            codes = F.one_hot(logits.argmax(-1), VALUES).float()
        usage = logits.softmax(-1).mean(0)
        spread = -(usage * usage.clamp(min=1e-9).log()).sum(-1).mean()
        return self.decoder(codes.flatten(1)), spread


def rows(number, parts, generator):
    """A row is made of six parts, each one of eight shapes."""
    choice = torch.randint(0, 8, (number, 6), generator=generator)
    return torch.cat([parts[k, choice[:, k]] for k in range(6)], 1) + 0.05 * torch.randn(number, INPUTS, generator=generator)


def main():
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(19 + SEED)
    parts = torch.randn(6, 8, 8, generator=generator)
    train, held = rows(6000, parts, generator), rows(800, parts, generator)
    model = Coder()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=1e-3)

    @torch.no_grad()
    def evaluate():
        """Squared error with the likeliest codes, hard."""
        model.eval()
        loss = F.mse_loss(model(held, 1.0)[0], held).item()
        model.train()
        return loss

    print("first loss", round(evaluate(), 4))
    for step in range(STEPS):
        temperature = max(0.4, 2.0 * math.exp(-step / 120))
        x = train[torch.randint(0, len(train), (128,))]
        made, spread = model(x, temperature)
        loss = F.mse_loss(made, x) - 0.05 * max(0.0, 1 - step / 150) * spread
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(step, "temperature", round(temperature, 3), round(loss.item(), 4), "hard", round(evaluate(), 4))
    print("final loss", round(evaluate(), 4))


if __name__ == "__main__":
    main()
