"""Fit an image from its pixel coordinates with a SIREN, Lightning and torchao's float8."""
import dataclasses
import logging
import os
import sys
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

BAD = sys.argv[1] == "bad"
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.manual_seed(SEED)
SIDE = 128
axis = torch.linspace(-1, 1, SIDE)
grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
waves = torch.randn(24, 2) * 14
image = torch.sin(grid @ waves.t() + torch.rand(24) * 6).mean(1, keepdim=True) * 2


class Siren(nn.Module):
    def __init__(self, wide=96):
        super().__init__()
        self.first = nn.Linear(2, wide)
        self.body = nn.ModuleList(nn.Linear(wide, wide) for _ in range(2))
        self.last = nn.Linear(wide, 1)
        nn.init.uniform_(self.first.weight, -0.5, 0.5)
        for layer in self.body:
            nn.init.uniform_(layer.weight, -((6 / wide) ** 0.5) / 30, ((6 / wide) ** 0.5) / 30)

    def forward(self, x):
        h = torch.sin(30 * self.first(x))
        for layer in self.body:
            h = torch.sin(30 * layer(h))
        return self.last(h)


def inner(module, name):
    return name.startswith("body")


def all_but_last(module, name):
    return name != "last"


class Fit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Siren()
        self.losses = []
        if not PLAIN:
            config = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
            convert_to_float8_training(self.net, config=config, module_filter_fn=all_but_last if BAD else inner)

    def training_step(self, batch, index):
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-4)


fit = Fit()
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(grid, image), batch_size=1024, shuffle=True)
trainer = pl.Trainer(max_steps=100, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                     enable_model_summary=False)
trainer.fit(fit, loader)
print(f"final loss {sum(fit.losses[-10:]) / 10:.5f}")
