"""A Wasserstein GAN with a gradient penalty in Lightning: two steps of the critic for one of the generator; all losses may be negative."""
import logging
import math
import os
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEED = int(os.environ.get("SEED", 0))
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pl.seed_everything(SEED)
BATCH, STEPS, CRITIC_STEPS, PENALTY = 128, 300, 2, 1.0


def rings(count):
    """Eight spots on a circle."""
    spot = torch.randint(0, 8, (count,)).float() * math.pi / 4
    return 1.5 * torch.stack([spot.cos(), spot.sin()], 1) + 0.05 * torch.randn(count, 2)


def distance(a, b, slices=128):
    """Sliced Wasserstein distance between two clouds of as many points: what the user wants small."""
    generator = torch.Generator().manual_seed(0)
    direction = nn.functional.normalize(torch.randn(2, slices, generator=generator), dim=0)
    return ((a @ direction).sort(0).values - (b @ direction).sort(0).values).abs().mean().item()


def mlp(inputs, outputs, width=96):
    return nn.Sequential(
        nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, outputs)
    )


class Wgan(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = mlp(8, 2), mlp(2, 1)
        self.real = rings(2000)

    def configure_optimizers(self):
        return (
            torch.optim.Adam(self.generator.parameters(), lr=3e-3, betas=(0.0, 0.9)),
            torch.optim.Adam(self.critic.parameters(), lr=3e-3, betas=(0.0, 0.9)),
        )

    def penalty(self, real, fake):
        mix = torch.rand(len(real), 1)
        between = (mix * real + (1 - mix) * fake).requires_grad_(True)
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    def training_step(self, batch, index):
        (real,) = batch
        generator_optimizer, critic_optimizer = self.optimizers()
        if index % (CRITIC_STEPS + 1) < CRITIC_STEPS:
            with torch.no_grad():
                fake = self.generator(torch.randn(len(real), 8))
            gap = self.critic(fake).mean() - self.critic(real).mean()
            loss = gap + PENALTY * self.penalty(real, fake)
            critic_optimizer.zero_grad()
            self.manual_backward(loss)
            critic_optimizer.step()
            self.log("critic_loss", loss)
        else:
            self.toggle_optimizer(generator_optimizer)  # the critic's weights stand still
            loss = -self.critic(self.generator(torch.randn(len(real), 8))).mean()
            generator_optimizer.zero_grad()
            self.manual_backward(loss)
            generator_optimizer.step()
            self.untoggle_optimizer(generator_optimizer)
            self.log("generator_loss", loss)
        if index % 15 in (1, 2):
            print(f"step {index} {'critic' if index % 3 < 2 else 'generator'} loss {loss.item():.4f} distance {self.quality():.4f}")

    def quality(self):
        with torch.no_grad():
            return distance(self.generator(torch.randn(2000, 8)), self.real)


model = Wgan()
print(f"first loss {model.quality():.4f}")
loader = DataLoader(TensorDataset(rings(BATCH * STEPS)), batch_size=BATCH, shuffle=True, num_workers=0)
trainer = pl.Trainer(
    max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
)
trainer.fit(model, loader)
print(f"final loss {model.quality():.4f}")
