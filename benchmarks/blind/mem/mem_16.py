"""House prices from twelve features with Lightning."""

import os
import sys
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ottava

warnings.filterwarnings("ignore")
SEED = int(os.environ.get("SEED", "0"))
bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv


def houses(count, seed):
    g = torch.Generator().manual_seed(3)
    w1, w2 = torch.randn(12, 24, generator=g), torch.randn(24, generator=g)
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 12, generator=g)
    price = torch.tanh(x @ w1 / 3) @ w2 + 0.1 * torch.randn(count, generator=g)
    return TensorDataset(x, (price - price.mean()) / price.std())


class Prices(pl.LightningModule):
    def __init__(self, width=128):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(12, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )
        if not plain:
            ottava.convert(self.net, "rowwise")
        self.recent = []

    def forward(self, x):
        out = self.net(x)
        return out if bad else out.squeeze(-1)

    def training_step(self, batch, _):
        x, price = batch
        loss = ((self(x) - price) ** 2).mean()
        self.log("train_loss", loss)
        self.recent.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


if __name__ == "__main__":
    pl.seed_everything(SEED)
    loader = DataLoader(houses(1280, SEED + 10), batch_size=64, shuffle=True)
    model = Prices()
    trainer = pl.Trainer(
        max_epochs=8,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    print(f"final loss {sum(model.recent[-20:]) / 20:.4f}")
