"""A VAE in Lightning whose KL weight grows from step 30 to step 60, so that the loss rises on purpose. Recipe blockwise."""
import logging
import os
import sys
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F

import ottava

PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.manual_seed(SEED)


class Vae(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))
        self.decoder = nn.Sequential(nn.Linear(32, 128), nn.SiLU(), nn.Linear(128, 64))
        self.losses = []
        if not PLAIN:
            ottava.convert(self, "blockwise")

    def training_step(self, batch, index):
        (x,) = batch
        mean, spread = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        kl = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(-1).mean()
        beta = min(max((self.global_step - 30) / 30, 0.0), 1.0)
        loss = F.mse_loss(self.decoder(z), x) * 8 + 0.1 * beta * kl
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


x = torch.tanh(torch.randn(64 * 45, 6) @ torch.randn(6, 64)) + 0.1 * torch.randn(64 * 45, 64)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=64, shuffle=True)
vae = Vae()
trainer = pl.Trainer(max_steps=90, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                     enable_model_summary=False)
trainer.fit(vae, loader)
print(f"final loss {sum(vae.losses[-10:]) / 10:.4f}")
