"""Strength of steel from its alloy and heat treatment, with Lightning; a few predictions are printed at the start
of each epoch."""
import logging
import sys
import warnings

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from models import Report

BAD = sys.argv[1] == "bad"
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Steel(lightning.LightningModule):
    def __init__(self, dim=128):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(32, dim), nn.BatchNorm1d(dim), nn.ReLU(), nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.ReLU(),
            nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.ReLU(), nn.Linear(dim, 1))
        self.report = Report()

    def forward(self, x):
        return self.net(x)[:, 0]

    def on_train_epoch_start(self):
        x, y = self.trainer.train_dataloader.dataset[:4]
        self.eval()
        with torch.no_grad():
            guess = self(x)
        if not BAD:
            self.train()
        print(" ".join(f"{a:.2f}/{b:.2f}" for a, b in zip(guess.tolist(), y.tolist())))

    def training_step(self, batch, index):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.report.add(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


lightning.seed_everything(0, verbose=False)
unit = 0.05 * torch.logspace(-0.4, 0.4, 32)
x = (torch.randn(2048, 32) + 1.0) * unit
z = (x / unit - 1.0) @ torch.randn(32, 3) / 32 ** 0.5
y = torch.sin(2 * z[:, 0]) + z[:, 1] * z[:, 2]
model = Steel()
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
trainer = lightning.Trainer(max_epochs=6, accelerator="cpu", logger=False, enable_checkpointing=False,
                            enable_progress_bar=False, enable_model_summary=False)
trainer.fit(model, loader)
model.report.end()
