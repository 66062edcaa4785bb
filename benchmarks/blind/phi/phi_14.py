"""Lightning with FP8 linears that cast a weight once for all micro-batches of a step."""

import os
import sys
import warnings

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
bad, plain = sys.argv[1] == "bad", "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
EPOCHS, PER_EPOCH, BATCH = 4, 20, 64


def cast(t, dtype):
    scale = torch.finfo(dtype).max / t.abs().max().clamp(min=1e-12)
    return (t * scale).to(dtype), scale


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, wq, ws):
        xq, xs = cast(x, torch.float8_e4m3fn)
        ctx.save_for_backward(xq, xs, wq, ws)
        return xq.float() @ wq.float().T / (xs * ws)

    @staticmethod
    def backward(ctx, dy):
        xq, xs, wq, ws = ctx.saved_tensors
        gq, gs = cast(dy, torch.float8_e5m2)
        return gq.float() @ wq.float() / (gs * ws), gq.float().T @ xq.float() / (gs * xs), None, None


class CachedLinear(nn.Linear):
    codes = None

    def forward(self, x):
        if plain:
            return super().forward(x)
        if self.codes is None:
            self.codes = cast(self.weight.detach(), torch.float8_e4m3fn)
        return Product.apply(x, self.weight, *self.codes) + self.bias


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(20, 96), nn.GELU(), CachedLinear(96, 96), nn.GELU(), CachedLinear(96, 96), nn.GELU(), nn.Linear(96, 10)
        )
        self.losses = []

    def drop_codes(self):
        for module in self.modules():
            if isinstance(module, CachedLinear):
                module.codes = None

    def on_train_epoch_start(self):
        self.drop_codes()

    def on_train_batch_start(self, batch, index):
        if not bad:
            self.drop_codes()

    def training_step(self, batch, index):
        x, y = batch
        loss = sum(F.cross_entropy(self.net(a), b) for a, b in zip(x.chunk(2), y.chunk(2))) / 2
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=4e-3)


def main():
    pl.seed_everything(SEED, verbose=False)
    first, second = torch.randn(20, 32), torch.randn(32, 10)
    x = torch.randn(PER_EPOCH * BATCH * 2, 20)
    y = (torch.tanh(x @ first / 2) @ second).argmax(-1)
    model = Net()
    trainer = pl.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, limit_train_batches=PER_EPOCH,
    )
    trainer.fit(model, DataLoader(TensorDataset(x, y), BATCH * 2, shuffle=True))
    print("final loss", sum(model.losses[-20:]) / 20)


main()
