"""A sparse autoencoder of activations: of 256 latents only the 8 largest of a row count, so 97 % of the code is 0.

Decoder columns go back to length 1 after each step, and their gradient along themselves is taken away. Latents that
have been silent for 20 steps explain what is left over, with a weight of 1/32.
"""

import os

import torch
from torch import nn

import ottava

SEED = int(os.environ.get("SEED", "0"))
INPUTS, LATENTS, KEEP, STEPS, BATCH = 64, 256, 8, 240, 256


class Sae(nn.Module):
    """Encoder and decoder; the decoder begins as the encoder's transpose."""

    def __init__(self, centre):
        super().__init__()
        self.centre = nn.Parameter(centre)
        self.encoder = nn.Linear(INPUTS, LATENTS)
        self.decoder = nn.Linear(LATENTS, INPUTS, bias=False)
        with torch.no_grad():
            nn.init.zeros_(self.encoder.bias)
            self.decoder.weight.copy_(nn.functional.normalize(self.encoder.weight.T, dim=0))

    def latents(self, x):
        return self.encoder(x - self.centre)

    def decode(self, before, keep):
        top = before.topk(keep, -1)
        code = torch.zeros_like(before).scatter(-1, top.indices, top.values.relu())
        return self.decoder(code), code


def activations(number, atoms, generator):
    """Sums of five of 200 directions, some of them much rarer than others, around a mean far from 0."""
    weights = 1.0 / torch.arange(1, len(atoms) + 1) ** 0.7
    chosen = torch.multinomial(weights.expand(number, -1), 5, generator=generator)
    sizes = 0.5 + torch.rand(number, 5, 1, generator=generator)
    return 3 + (atoms[chosen] * sizes).sum(1) + 0.02 * torch.randn(number, INPUTS, generator=generator)


@torch.no_grad()
def unexplained(model, x):
    """The share of the variance that the code does not explain."""
    made, _ = model.decode(model.latents(x), KEEP)
    return ((made + model.centre - x).square().sum() / (x - x.mean(0)).square().sum()).item()


def main():
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(44 + SEED)
    atoms = nn.functional.normalize(torch.randn(200, INPUTS, generator=generator), dim=1)
    data, held = activations(20000, atoms, generator), activations(1000, atoms, generator)
    model = Sae(data.mean(0))
    print(ottava.convert(model, "averis"))
    optimizer = torch.optim.Adam(model.parameters(), 4e-3, betas=(0.9, 0.99))
    silent = torch.zeros(LATENTS)
    print("first loss", round(unexplained(model, held), 4))
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, (STEPS - step) / 80)
        x = data[torch.randint(0, len(data), (BATCH,))]
        before = model.latents(x)
        made, code = model.decode(before, KEEP)
        left = x - made - model.centre
        loss = left.square().sum(-1).mean()
        silent = torch.where((code > 0).any(0), 0.0, silent + 1)
        dead = silent > 20
        if dead.sum() > 2 * KEEP:
            guess, _ = model.decode(before.masked_fill(~dead, -1e4), 2 * KEEP)
            loss = loss + (left.detach() - guess).square().sum(-1).mean() / 32
        loss.backward()
        with torch.no_grad():
            w = model.decoder.weight
            w.grad -= (w.grad * w).sum(0) * w  # columns have length 1
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            w.div_(w.norm(dim=0, keepdim=True))
        if step % 40 == 0:
            print(step, round(loss.item(), 4), "silent", int(dead.sum()), "unexplained", round(unexplained(model, held), 4))
    print("final loss", round(unexplained(model, held), 4))


if __name__ == "__main__":
    main()
