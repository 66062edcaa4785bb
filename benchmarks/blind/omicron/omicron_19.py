"""Lightning with an exponential moving average of the weights for validation."""

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
RESTORE = {"good": True, "bad": False}[sys.argv[1]]
PLAIN = "plain" in sys.argv[2:]


class Average(pl.Callback):
    def __init__(self, decay=0.995, restore=True):
        self.decay, self.restore = decay, restore
        self.shadow, self.backup = None, None

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if self.shadow is None:
            self.shadow = [p.detach().clone() for p in module.parameters()]
        for mean, p in zip(self.shadow, module.parameters(), strict=True):
            mean.lerp_(p.detach(), 1 - self.decay)

    def on_validation_start(self, trainer, module):
        if self.shadow is None:
            return
        self.backup = [p.detach().clone() for p in module.parameters()]
        for p, mean in zip(module.parameters(), self.shadow, strict=True):
            p.data.copy_(mean)

    def on_validation_end(self, trainer, module):
        if self.backup is None or not self.restore:
            return
        for p, saved in zip(module.parameters(), self.backup, strict=True):
            p.data.copy_(saved)
        self.backup = None


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 160), nn.GELU(), nn.Linear(160, 160), nn.GELU(), nn.Linear(160, 32))
        self.losses = []

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.net(x).float(), y)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val", F.cross_entropy(self.net(x).float(), y))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(23)
net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32))
x = torch.randn(160 * 32 + 256, 64)
y = (8 * net(x)).detach().argmax(-1)
train = torch.utils.data.TensorDataset(x[256:], y[256:])
held = torch.utils.data.TensorDataset(x[:256], y[:256])
model = Classifier()
trainer = pl.Trainer(
    max_epochs=1, val_check_interval=10, num_sanity_val_steps=0, accelerator="cpu", devices=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[Average(restore=RESTORE)], plugins=[] if PLAIN else [OttavaPrecision("rowwise")],
)  # fmt: skip
trainer.fit(
    model,
    torch.utils.data.DataLoader(train, batch_size=32, shuffle=True),
    torch.utils.data.DataLoader(held, batch_size=128),
)
print(f"loss {sum(model.losses[-10:]) / 10:.4f}")
