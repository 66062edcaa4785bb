"""A variational autoencoder in Lightning: the weight of the KL term goes from 0 to 1 four times, so the loss rises and falls like a saw."""
import logging
import os
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ottava

SEED = int(os.environ.get("SEED", 0))
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pl.seed_everything(SEED)
STEPS, CYCLE, BATCH, SIDE, NOISE = 200, 50, 128, 8, 0.1


def pictures(count):
    """One soft blob in a picture of 8 x 8: three numbers say it all."""
    place, size = torch.rand(count, 2, 1, 1) * 1.4 - 0.7, 0.05 + 0.2 * torch.rand(count, 1, 1)
    grid = torch.linspace(-1, 1, SIDE)
    y, x = torch.meshgrid(grid, grid, indexing="ij")
    blob = torch.exp(-((x - place[:, 0]) ** 2 + (y - place[:, 1]) ** 2) / size)
    return (0.02 + 0.96 * blob).flatten(1)


class Vae(pl.LightningModule):
    def __init__(self, width=128, latent=8):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(SIDE**2, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2 * latent)
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, SIDE**2)
        )
        self.held_out = pictures(1000)
        ottava.convert(self, "mxfp8", filter=lambda name, layer: name.endswith(".2"))  # the middle layers of both

    def loss(self, x, beta):
        mean, log_variance = self.encoder(x).chunk(2, 1)
        z = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        out = self.decoder(z)
        rebuilt = (out.sigmoid() - x).square().sum(1) / (2 * NOISE**2)
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
        return (rebuilt + beta * kl).mean(), kl.mean()

    def training_step(self, batch, index):
        (x,) = batch
        beta = min(1.0, 2 * (self.global_step % CYCLE) / CYCLE)
        loss, kl = self.loss(x, beta)
        if self.global_step % 10 == 0:
            print(f"step {self.global_step} beta {beta:.2f} loss {loss.item():.4f} kl {kl.item():.4f}")
        self.log("train_loss", loss)
        return loss

    def on_train_epoch_end(self):
        print(f"epoch {self.current_epoch} bound {self.bound():.4f}")

    def bound(self):
        with torch.no_grad():
            return self.loss(self.held_out, 1.0)[0].item()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS, eta_min=2e-4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


model = Vae()
print(f"first loss {model.bound():.4f}")
loader = DataLoader(TensorDataset(pictures(BATCH * 50)), batch_size=BATCH, shuffle=True, drop_last=True, num_workers=0)
trainer = pl.Trainer(
    max_epochs=STEPS // 50,
    accelerator="cpu",
    devices=1,
    gradient_clip_val=5.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, loader)
print(f"final loss {model.bound():.4f}")
