"""A variational autoencoder in Lightning whose KL weight grows in a staircase: the loss climbs at each stair."""
import os
import sys

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
L.seed_everything(seed, verbose=False)

PIXELS, LATENT, STEPS, BATCH = 64, 8, 160, 128
basis = torch.randn(6, PIXELS)


def images(n):
    return torch.sigmoid(torch.randn(n, 6) @ basis) + 0.05 * torch.randn(n, PIXELS)


class VAE(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(PIXELS, 128), nn.GELU(), nn.Linear(128, 2 * LATENT))
        self.decode = nn.Sequential(nn.Linear(LATENT, 128), nn.GELU(), nn.Linear(128, PIXELS))
        self.losses = []

    def training_step(self, batch, index):
        (x,) = batch
        mean, log_var = self.encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        fit = F.mse_loss(self.decode(z), x, reduction="none").sum(-1).mean() / 0.05
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(-1).mean()
        beta = (0.0, 0.3, 1.0, 3.0)[min(self.global_step // 40, 3)]
        loss = fit + beta * kl
        self.losses.append(loss.item())
        if index % 20 == 0:
            print(f"step {self.global_step} beta {beta} fit {fit.item():.3f} kl {kl.item():.3f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


model = VAE()
if not plain:
    config = Float8LinearConfig.from_recipe_name("rowwise")
    config = Float8LinearConfig(
        cast_config_input=config.cast_config_input, cast_config_weight=config.cast_config_weight,
        cast_config_grad_output=config.cast_config_grad_output, emulate=True,
    )
    convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: m.in_features >= 16)
loader = DataLoader(TensorDataset(images(BATCH * STEPS)), BATCH, shuffle=False)
trainer = L.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, loader)
print(f"final loss {np.mean(model.losses[-20:]):.4f}")
