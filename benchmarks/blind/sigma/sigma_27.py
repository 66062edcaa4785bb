"""Gradual unfreezing in Lightning: the head alone for 40 steps, then the body too, with a warm-up of its own."""
import logging
import os
import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F

SEED = int(os.environ.get("SEED", "0"))
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(24, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 96), nn.GELU(), nn.LayerNorm(96))
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(96, 10))
        self.body.requires_grad_(False)
        self.tail = []

    def on_train_batch_start(self, batch, i):
        if i == 40:
            self.body.requires_grad_(True)

    def training_step(self, batch, i):
        x, y = batch
        loss = F.cross_entropy(self.head(self.body(x)), y)
        self.tail.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(
            [{"params": self.body.parameters(), "lr": 2e-3}, {"params": self.head.parameters(), "lr": 4e-3}]
        )
        body, head = (lambda s: min(1.0, max(0, s - 39) / 8)), (lambda s: 1.0 if s < 40 else 0.5)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [body, head])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


pl.seed_everything(SEED, verbose=False)
centers = torch.randn(40, 24)
pick = torch.randint(0, 40, (48 * 95,))
x, y = centers[pick] + 0.7 * torch.randn(len(pick), 24), pick % 10
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=48, shuffle=True)
net = Classifier()
trainer = pl.Trainer(
    max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(net, loader)
print(f"final loss {sum(net.tail[-10:]) / 10:.4f}")
