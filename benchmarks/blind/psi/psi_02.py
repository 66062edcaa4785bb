"""Fits a picture of many waves by its coordinates, with Lightning."""
import logging
import os
import sys
import warnings

import lightning.pytorch as pl
import torch
import torch.nn as nn
import ottava

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
mode, plain = sys.argv[1], "plain" in sys.argv
seed = int(os.environ.get("SEED", 0))
pl.seed_everything(seed, verbose=False)

SIGNAL = "E5M2" if mode == "bad" else "E4M3"
RECIPE = {
    "name": "picture",
    "fprop": {"lhs": {"format": SIGNAL, "granularity": "tensor"}, "rhs": {"format": "E4M3", "granularity": "tensor"}},
    "dgrad": {"lhs": {"format": "E5M2", "granularity": "tensor"}, "rhs": {"format": "E4M3", "granularity": "tensor"}},
    "wgrad": {"lhs": {"format": "E5M2", "granularity": "tensor"}, "rhs": {"format": "E4M3", "granularity": "tensor"}},
}


class Sine(nn.Module):
    def forward(self, x):
        return torch.sin(x)


class Picture(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.randn(2, 32) * 3)
        self.net = nn.Sequential(
            nn.Linear(64, 128), Sine(), nn.Linear(128, 128), Sine(), nn.Linear(128, 128), Sine(), nn.Linear(128, 3)
        )
        self.losses = []

    def forward(self, xy):
        phase = xy @ self.frequencies
        return self.net(torch.cat([phase.sin(), phase.cos()], dim=-1))

    def training_step(self, batch, _):
        xy, color = batch
        loss = (self(xy) - color).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


xy = torch.rand(10000, 2) * 2 - 1
waves = torch.randn(2, 6) * 2.5
color = torch.sin(xy @ waves) @ torch.randn(6, 3) * 0.5
data = torch.utils.data.TensorDataset(xy, color)
loader = torch.utils.data.DataLoader(data, batch_size=512, shuffle=True, drop_last=True)

model = Picture()
if not plain:
    print(ottava.convert(model, ottava.recipe.Recipe.from_dict(RECIPE)))
trainer = pl.Trainer(
    max_steps=200, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(model, loader)
print(f"final loss {sum(model.losses[-20:]) / 20:.5f}")
