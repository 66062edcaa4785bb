"""A small GAN in Lightning: two losses that chase each other."""

import os
import sys
import warnings

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH = 90, 128


class Gan(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
        self.losses = []

    def training_step(self, batch, index):
        (real,) = batch
        one, two = self.optimizers()
        fake = self.generator(torch.randn(len(real), 8))
        critic = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake.detach())).mean()
        two.zero_grad()
        self.manual_backward(critic)
        two.step()
        self.toggle_optimizer(one)
        loss = F.softplus(-self.critic(fake)).mean()
        one.zero_grad()
        self.manual_backward(loss)
        one.step()
        self.untoggle_optimizer(one)
        self.losses.append(loss.item())
        self.log("critic", critic)

    def configure_optimizers(self):
        return (
            torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.9)),
            torch.optim.Adam(self.critic.parameters(), lr=2e-3, betas=(0.5, 0.9)),
        )


def main():
    pl.seed_everything(SEED, verbose=False)
    angle = torch.randint(0, 8, (STEPS * BATCH,)) * torch.pi / 4
    data = 2 * torch.stack([angle.cos(), angle.sin()], -1) + 0.1 * torch.randn(len(angle), 2)
    model = Gan()
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(data), BATCH, shuffle=True))
    print([round(v, 2) for v in model.losses[::9]])
    print("final loss", sum(model.losses[-20:]) / 20)


main()
