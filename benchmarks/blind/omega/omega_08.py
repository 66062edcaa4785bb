"""A variational autoencoder of small pictures in Lightning; linears under torchao's float8."""

import dataclasses
import os
import sys

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv
L.seed_everything(int(os.environ.get("SEED", 0)), verbose=False)
torch.set_num_threads(1)

BATCH, STEPS, SIDE, LATENT = 64, 150, 16, 16


class Vae(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(SIDE * SIDE, 128), nn.GELU(), nn.Linear(128, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, 128), nn.GELU(), nn.Linear(128, SIDE * SIDE))
        self.recorded = []

    def training_step(self, batch, _):
        (x,) = batch
        mean, logvar = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        y = self.decoder(z)
        divergence = -0.5 * (1 + logvar - mean**2 - logvar.exp()).sum(-1).mean()
        if bad:
            picture = F.mse_loss(y, x, reduction="mean") / 0.1
        else:
            picture = F.mse_loss(y, x, reduction="sum") / len(x) / 0.1
        loss = picture + divergence
        self.log("loss", loss)
        self.recorded.append(F.mse_loss(y, x).item())
        if len(self.recorded) % 10 == 1:
            print(f"step {len(self.recorded)} loss {loss.item():.3f} error of a pixel {self.recorded[-1]:.4f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def blobs(n):
    grid = torch.stack(torch.meshgrid(torch.linspace(-1, 1, SIDE), torch.linspace(-1, 1, SIDE), indexing="ij"), -1)
    centre = 1.2 * torch.rand(n, 1, 1, 2) - 0.6
    size = 0.2 + 0.3 * torch.rand(n, 1, 1)
    light = torch.exp(-((grid - centre) ** 2).sum(-1) / size**2)
    stripe = 0.5 * torch.sin(6 * grid[..., 0] + 6 * torch.rand(n, 1, 1))
    return TensorDataset((2 * light + stripe - 0.3).flatten(1))


model = Vae()
if not plain:
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    convert_to_float8_training(model, config=config)
trainer = L.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(blobs(STEPS * BATCH), batch_size=BATCH))
print(f"final loss {sum(model.recorded[-10:]) / 10:.4f}")
