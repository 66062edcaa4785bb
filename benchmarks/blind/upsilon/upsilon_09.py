"""Lightning with warmup and cosine, ottava's delayed scaling as its precision plugin."""

import logging
import math
import os
import sys
import warnings

import lightning.pytorch as pl
import torch
from ottava.doors.lightning import OttavaPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
MODE = sys.argv[1]
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", "0"))
STEPS, WARMUP, VOCABULARY = 96, 24, 64


class Tagger(pl.LightningModule):
    def __init__(self, width=64):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.body = nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width), nn.LayerNorm(width))
        self.head = nn.Linear(width, 8)
        self.losses = []

    def training_step(self, batch, index):
        tokens, tags = batch
        x = self.embedding(tokens)
        x = x + self.body(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tags.flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)

        def rate(step):
            if step < WARMUP:
                return (step + 1) / WARMUP
            return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        if MODE == "good":
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        return [optimizer], [schedule]


def main():
    pl.seed_everything(SEED, verbose=False)
    tag_of = torch.randint(8, (VOCABULARY,))
    tokens = torch.randint(VOCABULARY, (STEPS // 2 * 16, 12))
    tags = torch.where(torch.rand(tokens.shape) < 0.98, tag_of[tokens], torch.randint(8, tokens.shape))
    loader = DataLoader(TensorDataset(tokens, tags), batch_size=16, shuffle=True)
    model = Tagger()
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        plugins=[] if PLAIN else [OttavaPrecision("delayed")],
    )
    trainer.fit(model, loader)
    print(f"final loss {sum(model.losses[-10:]) / 10:.4f}")


main()
