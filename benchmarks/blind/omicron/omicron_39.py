"""A variational autoencoder in Lightning; the weight of its KL term rises and falls in cycles."""

import logging
import sys
import warnings

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn

from ottava.doors.lightning import OttavaPrecision

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")
MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]


class Autoencoder(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(96, 128), nn.SiLU(), nn.Linear(128, 64))
        self.decoder = nn.Sequential(nn.Linear(32, 128), nn.SiLU(), nn.Linear(128, 96))
        self.losses = []

    def training_step(self, batch, index):
        x = batch[0]
        mean, log_var = self.encoder(x).float().chunk(2, -1)
        z = mean + (0.5 * log_var).exp() * torch.randn_like(mean)
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(-1).mean()
        weight = min(1.0, (self.global_step % 50) / 25)
        loss = F.mse_loss(self.decoder(z).float(), x, reduction="sum") / len(x) / 2 + weight * kl
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


torch.manual_seed(89)
x = torch.tanh(torch.randn(160 * 48, 6) @ torch.randn(6, 96)) + 0.2 * torch.randn(160 * 48, 96)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=48, shuffle=True)
model = Autoencoder()
trainer = pl.Trainer(
    max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, plugins=[] if PLAIN else [OttavaPrecision("delayed")],
)  # fmt: skip
trainer.fit(model, loader)
print(f"loss {sum(model.losses[-10:]) / 10:.4f}")
