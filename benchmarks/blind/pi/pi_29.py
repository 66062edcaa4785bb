"""Warm restarts of the learning rate, by Lightning: python pi_29.py good|bad [plain]."""

import logging
import sys
import warnings

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ottava

MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 8))
        self.losses = []

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.4, momentum=0.9, nesterov=True)
        restarts = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=40, T_mult=1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": restarts, "interval": "step"}}


L.seed_everything(29)
x = torch.randn(2000, 32)
y = torch.sin(x @ torch.randn(32, 8) * 0.15) + 0.1 * torch.randn(2000, 8)
model = Regressor()
if not PLAIN:
    ottava.convert(model, "mxfp8", filter=lambda name, layer: not name.endswith("4"))
trainer = L.Trainer(
    max_epochs=4,
    accelerator="cpu",
    gradient_clip_val=5.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True))
print(f"loss {sum(model.losses[-10:]) / 10:.4f}")
