"""A variational autoencoder with Lightning; the weight of the divergence grows from 0 to 1, so the loss rises in
the middle."""
import logging
import warnings

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from models import Report

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Vae(lightning.LightningModule):
    def __init__(self, dim=128):
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(144, dim), nn.SiLU(), nn.Linear(dim, 32))
        self.leave = nn.Sequential(nn.Linear(16, dim), nn.SiLU(), nn.Linear(dim, 144))
        self.report = Report()

    def training_step(self, batch, index):
        x = batch[0]
        mean, log_var = self.enter(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (log_var / 2).exp()
        fit = F.mse_loss(self.leave(z), x, reduction="none").sum(-1).mean() / 0.5
        divergence = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(-1).mean()
        beta = min(1.0, max(0.0, (self.global_step - 80) / 100))
        loss = fit + beta * divergence
        self.report.add(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


lightning.seed_everything(0, verbose=False)
x = torch.tanh(torch.randn(2048, 6) @ torch.randn(6, 144) / 2) + 0.1 * torch.randn(2048, 144)
model = Vae()
trainer = lightning.Trainer(max_epochs=8, accelerator="cpu", logger=False, enable_checkpointing=False,
                            enable_progress_bar=False, enable_model_summary=False)
trainer.fit(model, DataLoader(TensorDataset(x), batch_size=64, shuffle=True))
model.report.end()
