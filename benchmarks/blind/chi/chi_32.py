"""Lightning: one regressor for two plants whose sensors have other units; batches come from the plants in turn."""
import logging
import os
import sys
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ottava

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
HISTORY = {"good": 16, "bad": 1}[MODE]
STEPS, BATCH = 160, 96


class Plants(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(10 + SEED)
        self.w = torch.randn(48, 8, generator=g) / 7
        self.x = torch.randn(STEPS * BATCH, 48, generator=g)
        self.y = torch.tanh(self.x @ self.w) + 0.02 * torch.randn(STEPS * BATCH, 8, generator=g)

    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, i):
        unit = 1.0 if (i // BATCH) % 2 == 0 else 40.0
        return unit * self.x[i], self.y[i], torch.tensor(unit)


class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(48, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))
        self.head = nn.Linear(64, 8)
        self.losses = []

    def training_step(self, batch, index):
        x, y, unit = batch
        loss = F.mse_loss(self.head(self.body(x) / unit[:, None]), y)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)]


L.seed_everything(SEED, verbose=False)
model = Regressor()
if not PLAIN:
    recipe = ottava.get_recipe("delayed", amax_history_len=HISTORY)
    ottava.convert(model.body, recipe)
trainer = L.Trainer(
    max_epochs=1,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(Plants(), batch_size=BATCH, shuffle=False))
print("final loss", round(sum(model.losses[-20:]) / 20, 4))
