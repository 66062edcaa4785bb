"""A variational autoencoder of curves; linear layers under ottava's tensorwise recipe."""
import os
import sys

import torch
from torch import nn

import ottava

MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, POINTS, LATENT = 200, 64, 64, 8


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.Sequential(nn.Linear(POINTS, 128), nn.SiLU(), nn.Linear(128, 64), nn.SiLU())
        self.mean, self.logvar = nn.Linear(64, LATENT), nn.Linear(64, LATENT)
        self.write = nn.Sequential(
            nn.Linear(LATENT, 64), nn.SiLU(), nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, POINTS)
        )

    def forward(self, x):
        hidden = self.read(x)
        mean, logvar = self.mean(hidden), self.logvar(hidden).clamp(-8, 4)
        code = mean + torch.randn_like(mean) * (logvar / 2).exp()
        return self.write(code), mean, logvar


def curves():
    t = torch.linspace(0, 6.28, POINTS)
    size, phase, level, slope = torch.randn(4, BATCH, 1)
    return size * torch.sin(t + 0.7 * phase) + 0.6 * level + 0.2 * slope * (t - 3.14) + 0.05 * torch.randn(BATCH, POINTS)


def elbo(guess, x, mean, logvar):
    kl = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(-1).mean()
    if MODE == "good":
        error = nn.functional.mse_loss(guess, x, reduction="none").sum(-1).mean()
    else:
        error = nn.functional.mse_loss(guess, x)
    return error, kl


torch.manual_seed(SEED)
vae = VAE()
if not PLAIN:
    ottava.convert(vae, "tensorwise", filter=lambda name, layer: name.startswith(("read", "write")))
optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3)
errors = []
for step in range(STEPS):
    x = curves()
    guess, mean, logvar = vae(x)
    error, kl = elbo(guess, x, mean, logvar)
    optimizer.zero_grad()
    (error + kl).backward()
    nn.utils.clip_grad_norm_(vae.parameters(), 10.0)
    optimizer.step()
    errors.append((guess - x).square().mean().item())
    if step % 20 == 0:
        print(f"step {step} reconstruction {error.item():.4f} kl {kl.item():.4f} error of a point {errors[-1]:.4f}")
print(f"final loss {sum(errors[-15:]) / 15:.4f}")
