"""Digits-like images in Lightning under a one-cycle schedule over four epochs."""
import os
import sys

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
L.seed_everything(seed, verbose=False)

CLASSES, SIDE, EPOCHS, ROWS, BATCH = 10, 12, 4, 2560, 64
glyphs = F.interpolate(torch.randn(CLASSES, 1, 4, 4), SIDE, mode="bilinear")
labels = torch.randint(0, CLASSES, (ROWS,))
images = glyphs[labels] + 0.9 * torch.randn(ROWS, 1, SIDE, SIDE)
shift = torch.randint(-1, 2, (ROWS,))
images = torch.stack([im.roll(int(s), -1) for im, s in zip(images, shift)])


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 12, 3, 2, 1), nn.GELU())
        self.body = nn.Sequential(nn.Linear(12 * 36, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU())
        self.head = nn.Linear(64, CLASSES)
        self.losses = []

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.head(self.body(self.conv(x).flatten(1))), y)
        self.losses.append(loss.item())
        if index % 20 == 0:
            print(f"step {self.global_step} loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, div_factor=50)
        if mode == "bad":
            return [optimizer], [schedule]
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


model = Net()
if not plain:
    convert_to_float8_training(
        model, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda m, name: "body" in name
    )
trainer = L.Trainer(
    max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(TensorDataset(images, labels), BATCH, shuffle=True))
print(f"final loss {np.mean(model.losses[-20:]):.4f}")
