"""The first Wasserstein GAN: the critic's weights are clipped to +-0.05 after each of its steps, and up to two fifths
of them stand at the bound.

Five steps of the critic for one of the generator, RMSprop for both. The critic's loss is negative and goes towards 0
as samples get better.
"""

import math
import os

import torch
from torch import nn

SEED = int(os.environ.get("SEED", "0"))
STEPS, BATCH, BOUND, NOISE = 300, 128, 0.05, 8


def mlp(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def moon(number, generator):
    """A bow of points, thicker at one end."""
    angle = math.pi * torch.rand(number, generator=generator)
    away = 2 + (0.05 + 0.2 * angle / math.pi) * torch.randn(number, generator=generator)
    return torch.stack([away * angle.cos(), away * angle.sin() - 1], 1)


def distance(a, b, generator):
    """Sliced Wasserstein distance."""
    lines = nn.functional.normalize(torch.randn(2, 64, generator=generator), dim=0)
    return ((a @ lines).sort(0).values - (b @ lines).sort(0).values).abs().mean().item()


def main():
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(4 + SEED)
    data, held = moon(8000, generator), moon(2000, generator)
    maker, critic = mlp(NOISE, 2), mlp(2, 1)
    with torch.no_grad():
        for p in critic.parameters():
            p.clamp_(-BOUND, BOUND)
    optimizer_m = torch.optim.RMSprop(maker.parameters(), 1e-3)
    optimizer_c = torch.optim.RMSprop(critic.parameters(), 1e-3)

    @torch.no_grad()
    def evaluate():
        draw = torch.Generator().manual_seed(99)
        return distance(maker(torch.randn(2000, NOISE, generator=draw)), held, draw)

    print("first loss", round(evaluate(), 4))
    for step in range(STEPS):
        for _ in range(5):
            real = data[torch.randint(0, len(data), (BATCH,))]
            with torch.no_grad():
                false = maker(torch.randn(BATCH, NOISE))
            loss_c = critic(false).mean() - critic(real).mean()
            optimizer_c.zero_grad()
            loss_c.backward()
            optimizer_c.step()
            with torch.no_grad():
                for p in critic.parameters():
                    p.clamp_(-BOUND, BOUND)
        for p in critic.parameters():
            p.requires_grad_(False)
        loss_m = -critic(maker(torch.randn(BATCH, NOISE))).mean()
        optimizer_m.zero_grad()
        loss_m.backward()
        optimizer_m.step()
        for p in critic.parameters():
            p.requires_grad_(True)
        if step % 20 == 0:
            stands = torch.cat([(p.abs() >= BOUND - 1e-7).flatten() for p in critic.parameters()]).float().mean().item()
            print(step, f"critic {loss_c.item():.6f} at the bound {stands:.2f}", "distance", round(evaluate(), 4))
    print("final loss", round(evaluate(), 4))


if __name__ == "__main__":
    main()
