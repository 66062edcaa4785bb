"""A GAN on a mixture of rings, with manual optimization in Lightning."""

import logging
import sys
import warnings

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ottava

PLAIN = "plain" in sys.argv
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def net(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, outputs)
    )


class Gan(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = net(32, 32), net(32, 1)
        self.losses = []

    def training_step(self, batch, _):
        real = batch[0]
        generator_optimizer, critic_optimizer = self.optimizers()
        fake = self.generator(torch.randn(len(real), 32))
        critic_loss = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake.detach())).mean()
        critic_optimizer.zero_grad()
        self.manual_backward(critic_loss)
        critic_optimizer.step()
        generator_loss = F.softplus(-self.critic(fake)).mean()
        generator_optimizer.zero_grad()
        self.manual_backward(generator_loss)
        generator_optimizer.step()
        self.losses.append(generator_loss.item())

    def configure_optimizers(self):
        return (
            torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.99)),
            torch.optim.Adam(self.critic.parameters(), lr=1e-3, betas=(0.5, 0.99)),
        )


def main():
    lightning.seed_everything(1, verbose=False)
    angle = torch.rand(200 * 128) * 6.2832
    radius = torch.randint(1, 4, angle.shape) / 2
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1) @ torch.randn(2, 32) / 2
    points += 0.05 * torch.randn_like(points)
    gan = Gan()
    if not PLAIN:
        ottava.convert(gan, "tensorwise")
    trainer = lightning.Trainer(
        max_steps=400,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(gan, DataLoader(TensorDataset(points), batch_size=128, shuffle=True))
    print(f"loss {sum(gan.losses[-10:]) / 10:.4f}")


if __name__ == "__main__":
    main()
