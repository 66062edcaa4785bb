"""Warm restarts of the learning rate in Lightning, with dropout and label smoothing."""

import logging
import sys
import warnings

import lightning
import torch
import torch.nn.functional as F
from torch import nn

import ottava

PLAIN = "plain" in sys.argv[2:]
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(32, 192),
            nn.GELU(),
            nn.Dropout(0.3),
            nn.Linear(192, 192),
            nn.GELU(),
            nn.Dropout(0.3),
            nn.Linear(192, 16),
        )
        self.losses = []

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y, label_smoothing=0.1)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=8e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=20, T_mult=2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


torch.manual_seed(34)
x = torch.randn(4480, 32)
y = (torch.tanh(x @ torch.randn(32, 24) / 3) @ torch.randn(24, 16)).argmax(1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=64, shuffle=True)
model = Net()
if not PLAIN:
    ottava.convert(model, "rowwise", filter=lambda name, layer: not name.endswith("6"))
trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, loader)
print(f"loss {sum(model.losses[-10:]) / 10:.4f}")
