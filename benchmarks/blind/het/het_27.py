"""Claims with heavy tails in Lightning: a few batches cost a hundred times the others, with a Huber loss in log space
for the mean and a pinball loss for the upper tail."""
import os
import sys

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

mode = sys.argv[1]
seed = int(os.environ.get("SEED", 0))
L.seed_everything(seed, verbose=False)

ROWS, FEATURES, BATCH, EPOCHS = 6400, 20, 128, 3
x = torch.randn(ROWS, FEATURES)
weights = torch.randn(FEATURES, 2) / FEATURES**0.5
location = (x @ weights).tanh().sum(1) + 1
tail = torch.distributions.StudentT(1.6).sample((ROWS,)).abs()
claims = location.exp() * (1 + tail)


class Claims(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))
        self.costs, self.losses = [], []

    def training_step(self, batch, index):
        x, claim = batch
        middle, upper = self.net(x).unbind(1)
        fit = nn.functional.huber_loss(middle, claim.log())
        gap = claim - upper.exp()
        pinball = torch.maximum(0.9 * gap, -0.1 * gap).mean()
        loss = fit + 0.2 * pinball
        self.costs.append(loss.item())
        if self.global_step % 15 == 0:
            print(f"step {self.global_step} fit {fit.item():.4f} pinball {pinball.item():.3f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


model = Claims()
trainer = L.Trainer(
    max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, gradient_clip_val=5.0,
)
trainer.fit(model, DataLoader(TensorDataset(x, claims), BATCH, shuffle=True))
print(f"final loss {np.median(model.costs[-30:]):.4f}")
