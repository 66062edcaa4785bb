"""A two-tower recommender in Lightning, with one optimizer for the tables and one for the tower."""

import os
import sys
import warnings
from dataclasses import replace

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

warnings.filterwarnings("ignore")
bad, plain = sys.argv[1] == "bad", "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, ITEMS, CLASSES = 80, 256, 256, 16


class Recommender(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.items = nn.EmbeddingBag(ITEMS, 64, mode="mean")
        nn.init.normal_(self.items.weight, std=0.5)
        self.tower = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU())
        self.head = nn.Linear(128, CLASSES)
        self.losses = []

    def configure_optimizers(self):
        dense = [*self.tower.parameters(), *self.head.parameters()]
        return torch.optim.Adam(self.items.parameters(), lr=3e-2), torch.optim.SGD(dense, lr=0.2, momentum=0.9)

    def training_step(self, batch, index):
        tables, tower = self.optimizers()
        history, label = batch
        loss = F.cross_entropy(self.head(self.tower(self.items(history))), label)
        tables.zero_grad()
        if not bad:
            tower.zero_grad()
        self.manual_backward(loss)
        tables.step()
        tower.step()
        self.losses.append(loss.item())


def main():
    pl.seed_everything(SEED, verbose=False)
    generator = torch.Generator().manual_seed(SEED + 1)
    taste = torch.randn(ITEMS, CLASSES, generator=generator)
    history = torch.randint(0, ITEMS, (STEPS * BATCH, 8), generator=generator)
    label = taste[history].mean(1).argmax(-1)
    model = Recommender()
    if not plain:
        config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
        convert_to_float8_training(model.tower, config=config)
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(history, label), BATCH))
    print("final loss", sum(model.losses[-10:]) / 10)


main()
