"""Lightning's learning rate finder, then the training: the finder raises the rate in each step until the loss blows up,
puts the weights back, and a fifth of the rate with the lowest loss is taken.

python zayin_11.py good|bad
"""

import os
import tempfile
import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ottava.doors.lightning import OttavaPrecision

warnings.filterwarnings("ignore", message=".*num_workers.*")
SEED = int(os.environ.get("SEED", 0))
pl.seed_everything(SEED, verbose=False)
INPUTS = 32
hidden_law = nn.Sequential(nn.Linear(INPUTS, 24), nn.Tanh(), nn.Linear(24, 1))
for p in hidden_law.parameters():
    p.data.mul_(3.0)


def rows(count):
    x = torch.randn(count, INPUTS)
    with torch.no_grad():
        y = hidden_law(x) + 0.05 * torch.randn(count, 1)
    return TensorDataset(x, y)


class Regression(pl.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(INPUTS, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 1)
        )

    def loss(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.net(x).float(), y)

    def training_step(self, batch, index):
        return self.loss(batch)

    def validation_step(self, batch, index):
        self.log("held_out", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "epoch"}}


model = Regression()
train = DataLoader(rows(2048), batch_size=64, shuffle=True)
test = DataLoader(rows(512), batch_size=256)
with tempfile.TemporaryDirectory() as folder:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = pl.Trainer(
        default_root_dir=folder,
        max_epochs=8,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        plugins=[OttavaPrecision("blockwise_fp32")],
        **quiet,
    )
    first = trainer.validate(model, test, verbose=False)[0]["held_out"]
    print(f"first loss {first:.4f}")
    finder = Tuner(trainer).lr_find(
        model, train, min_lr=1e-5, max_lr=5.0, num_training=60, early_stop_threshold=8.0, update_attr=False
    )
    print(f"tried {len(finder.results['lr'])} rates, the last loss {finder.results['loss'][-1]:.3f}")
    losses = torch.tensor(finder.results["loss"])
    model.lr = finder.results["lr"][int(losses[10:].argmin()) + 10] / 5
    print(f"rate {model.lr:.4f}")
    trainer.fit(model, train, test)
    final = trainer.validate(model, test, verbose=False)[0]["held_out"]
print(f"final loss {final:.4f}")
