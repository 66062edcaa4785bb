"""Lightning: a new head on a backbone that stays as it is, small batches, much dropout."""

import logging
import sys
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ottava

PLAIN = "plain" in sys.argv
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


class Probe(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 128), nn.Tanh())
        self.backbone.requires_grad_(False).eval()
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 6))
        self.losses = []

    def training_step(self, batch, _):
        x, y = batch
        with torch.no_grad():
            x = self.backbone(x)
        loss = nn.functional.cross_entropy(self.head(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.head.parameters(), lr=2e-3)


torch.manual_seed(36)
x = torch.randn(160 * 12, 32)
y = (x @ torch.randn(32, 6) + torch.randn(160 * 12, 6) * 3).argmax(1)
module = Probe()
if not PLAIN:
    ottava.convert(module, "tensorwise")
lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
).fit(module, DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True))
print(f"loss {sum(module.losses[-10:]) / 10:.4f}")
