"""Lightning: a residual regressor under warm restarts of the learning rate; ottava's linears."""

import os
import sys

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ottava

plain = "plain" in sys.argv
L.seed_everything(int(os.environ.get("SEED", 0)), verbose=False)
torch.set_num_threads(1)

BATCH, STEPS, FEATURES, WIDTH = 64, 160, 48, 96


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, WIDTH), Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))
        if not plain:
            ottava.convert(self.net, "delayed")
        self.losses = []

    def training_step(self, batch, _):
        x, y = batch
        loss = F.huber_loss(self.net(x)[:, 0], y)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.25, momentum=0.9, nesterov=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=40, eta_min=1e-4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def measurements(n):
    w = torch.randn(FEATURES, 3, generator=torch.Generator().manual_seed(6)) / FEATURES**0.5
    x = torch.randn(n, FEATURES)
    z = x @ w
    return TensorDataset(x, 2 * z[:, 0] + torch.sin(2 * z[:, 1]) + z[:, 2].abs() + 0.1 * torch.randn(n))


model = Regressor()
trainer = L.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, gradient_clip_val=1.0,
)
trainer.fit(model, DataLoader(measurements(STEPS * BATCH), batch_size=BATCH))
for step in range(0, STEPS, 10):
    print(f"step {step} loss {model.losses[step]:.4f}")
print(f"final loss {sum(model.losses[-10:]) / 10:.4f}")
