"""A small forecaster in Lightning with a warmup; FP8 through a precision plugin."""

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
INTERVAL = {"good": "step", "bad": "epoch"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


class Forecaster(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32))
        self.losses = []

    def training_step(self, batch, index):
        past, future = batch
        loss = F.mse_loss(self.net(past).float(), future)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 30))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": INTERVAL}}


torch.manual_seed(4)
time = torch.arange(96) / 8 + 6.28 * torch.rand(150 * 32, 1)
wave = torch.sin(time) * (1 + torch.rand(150 * 32, 1)) + torch.sin(2.5 * time + 6.28 * torch.rand(150 * 32, 1))
wave += 0.05 * torch.randn_like(wave)
data = torch.utils.data.TensorDataset(wave[:, :64], wave[:, 64:])
loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
model = Forecaster()
trainer = pl.Trainer(
    max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, plugins=[] if PLAIN else [OttavaPrecision("tensorwise")],
)  # fmt: skip
trainer.fit(model, loader)
print(f"loss {sum(model.losses[-10:]) / 10:.4f}")
