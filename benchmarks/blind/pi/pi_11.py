"""A tabular classifier by Lightning: python pi_11.py good|bad [plain]."""

import logging
import sys
import warnings

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ottava

INTERVAL = {"good": "epoch", "bad": "step"}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(32, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32)
        )
        self.losses = []

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": INTERVAL}}


L.seed_everything(11)
rule = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32))
x = torch.randn(1600, 32)
with torch.no_grad():
    y = (rule(x) * 6).argmax(dim=1)
model = Classifier()
if not PLAIN:
    ottava.convert(model, "tensorwise", filter=lambda name, layer: not name.endswith("5"))
trainer = L.Trainer(
    max_epochs=5,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True))
print(f"loss {sum(model.losses[-10:]) / 10:.4f}")
