"""Mixup and label smoothing end after two thirds of the run: the loss drops at once; Lightning, torchao's row-wise float8."""

import logging
import os
import sys
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
MODE = sys.argv[1]
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", "0"))
STEPS, CLASSES = 90, 10


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU())
        self.head = nn.Linear(128, CLASSES)
        self.losses = []

    def training_step(self, batch, index):
        x, y = batch
        target = nn.functional.one_hot(y, CLASSES).float()
        if self.global_step < STEPS * 2 // 3:
            target = 0.9 * target + 0.1 / CLASSES
            share = torch.distributions.Beta(0.4, 0.4).sample()
            order = torch.randperm(len(x))
            x, target = share * x + (1 - share) * x[order], share * target + (1 - share) * target[order]
        loss = nn.functional.cross_entropy(self.head(self.body(x)), target)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main():
    pl.seed_everything(SEED, verbose=False)
    means = torch.randn(CLASSES, 64)
    y = torch.randint(CLASSES, (STEPS * 32,))
    x = means[y] + 1.7 * torch.randn(len(y), 64)
    model = Net()
    if not PLAIN:
        config = Float8LinearConfig.from_recipe_name("rowwise")
        config = Float8LinearConfig(**{**config.__dict__, "emulate": True})
        convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != "head")
    trainer = pl.Trainer(
        max_steps=STEPS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
    )
    trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True))
    print(f"final loss {sum(model.losses[-10:]) / 10:.4f}")


main()
