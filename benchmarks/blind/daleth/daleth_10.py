"""Barlow Twins in Lightning: two noisy views of a row, a loss on the cross-correlation of their codes, no labels."""
import logging
import os
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
SEED = int(os.environ.get("SEED", "0"))
pl.seed_everything(SEED, verbose=False)
CLASSES, DIM = 12, 48
centres = torch.randn(CLASSES, 8)
spread = torch.randn(8, DIM) / 3
nuisance = torch.randn(16, DIM) / 3


def rows(count):
    label = torch.randint(CLASSES, (count,))
    return (centres[label] + 0.3 * torch.randn(count, 8)) @ spread, label


def view(x):
    """The same row under another nuisance, strong in 16 directions."""
    return x + torch.randn(len(x), 16) @ nuisance + 0.1 * torch.randn_like(x)


class Barlow(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(DIM, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 16))
        self.projector = nn.Sequential(nn.Linear(16, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64))
        self.norm = nn.BatchNorm1d(64, affine=False)

    def training_step(self, batch, _):
        one, two = (self.norm(self.projector(self.encoder(view(batch[0])))) for _ in range(2))
        corr = one.t() @ two / len(one)
        on = (torch.diagonal(corr) - 1).square().sum()
        off = corr.square().sum() - torch.diagonal(corr).square().sum()
        loss = on + 0.02 * off
        self.log("train_loss", loss, on_epoch=True, on_step=False)
        return loss

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim == 1]
        optimizer = torch.optim.SGD(
            [{"params": decay, "weight_decay": 1e-4}, {"params": rest, "lr": 0.0003}], lr=0.001, momentum=0.9
        )
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "train_loss"}}


bank, bank_label = rows(1500)
test, test_label = rows(500)
bank, test = view(bank), view(test)


@torch.no_grad()
def error(model):
    """Share of held-out rows whose 15 nearest neighbours vote for another class."""
    model.eval()
    codes = [nn.functional.normalize(model.encoder(x), dim=1) for x in (test, bank)]
    near = (codes[0] @ codes[1].t()).topk(15).indices
    return (bank_label[near].mode(1).values != test_label).float().mean().item()


model = Barlow()
print("first loss %.4f" % error(model))
loader = DataLoader(TensorDataset(rows(5120)[0]), batch_size=256, shuffle=True, drop_last=True)
trainer = pl.Trainer(
    max_epochs=12,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    enable_checkpointing=False,
)
trainer.fit(model, loader)
print("final loss %.4f" % error(model))
