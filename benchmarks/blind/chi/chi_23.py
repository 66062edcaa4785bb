"""Lightning: character-like sequences, a small LSTM tagger, warm restarts of the learning rate, ottava's tensorwise."""
import logging
import os
import sys
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ottava

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, T, VOCAB, D = 160, 32, 16, 40, 64


class Tagger(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.emb, self.lstm = nn.Embedding(VOCAB, D), nn.LSTM(D, D, batch_first=True)
        self.body = nn.Sequential(nn.Linear(D, 2 * D), nn.ReLU(), nn.Linear(2 * D, D), nn.ReLU())
        self.out = nn.Linear(D, 8)
        self.losses = []

    def training_step(self, batch, index):
        ids, tags = batch
        h, _ = self.lstm(self.emb(ids))
        loss = F.cross_entropy(self.out(self.body(h)).flatten(0, 1), tags.flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 40, eta_min=1e-5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


L.seed_everything(SEED, verbose=False)
g = torch.Generator().manual_seed(300 + SEED)
ids = torch.randint(0, VOCAB, (STEPS * BATCH, T), generator=g)
table = torch.randint(0, 8, (VOCAB, 8), generator=g)
tags = torch.zeros_like(ids)
state = torch.zeros(len(ids), dtype=torch.long)
for t in range(T):
    state = table[ids[:, t], state]
    tags[:, t] = state
model = Tagger()
if not PLAIN:
    ottava.convert(model, "tensorwise")
trainer = L.Trainer(
    max_epochs=1,
    accelerator="cpu",
    logger=False,
    gradient_clip_val=1.0,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(TensorDataset(ids, tags), batch_size=BATCH))
print("final loss", round(sum(model.losses[-10:]) / 10, 4))
