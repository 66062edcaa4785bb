"""Forecasts for a growing market in Lightning; scales of the 8-bit casts come from the amax seen so far."""
import os
import sys

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

mode = sys.argv[1]
plain = "plain" in sys.argv[2:]
seed = int(os.environ.get("SEED", 0))
L.seed_everything(seed, verbose=False)

LAGS, STEPS, BATCH = 32, 150, 96


class Market(IterableDataset):
    def __iter__(self):
        g = torch.Generator().manual_seed(seed + 3)
        days = torch.arange(LAGS + 1)
        for step in range(STEPS):
            for _ in range(BATCH):
                level = 40 ** (step / STEPS) * (0.7 + 0.6 * torch.rand(1, generator=g))
                season = torch.sin(days * 6.28 / 7 + 6.28 * torch.rand(1, generator=g)) * torch.rand(1, generator=g)
                trend = 0.02 * torch.randn(1, generator=g) * days
                sales = level * (1 + season + trend + 0.05 * torch.randn(LAGS + 1, generator=g))
                yield sales[:-1], sales[-1:] / level


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Linear8(nn.Linear):
    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out)
        self.register_buffer("scale", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))

    def refresh(self):
        self.scale.copy_(224 / self.seen)
        self.seen.zero_()

    def forward(self, x):
        if plain:
            return super().forward(x)
        self.seen.copy_(torch.maximum(self.seen, x.detach().abs().amax()))
        if self.scale == 0:
            self.scale.copy_(224 / self.seen)
        weight = Cast.apply(self.weight, 448 / self.weight.detach().abs().amax())
        return F.linear(Cast.apply(x, self.scale), weight, self.bias)


class Refresh(L.Callback):
    def refresh(self, module):
        for layer in module.modules():
            if isinstance(layer, Linear8) and not plain:
                layer.refresh()

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if mode == "good":
            self.refresh(module)

    def on_train_epoch_end(self, trainer, module):
        self.refresh(module)


class Forecast(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = Linear8(LAGS, 96)
        self.norm = nn.LayerNorm(96)
        self.body = nn.Sequential(Linear8(96, 96), nn.GELU(), Linear8(96, 64), nn.GELU(), nn.Linear(64, 1))
        self.losses = []

    def training_step(self, batch, index):
        lags, target = batch
        loss = F.mse_loss(self.body(self.norm(self.inner(lags))), target)
        self.losses.append(loss.item())
        if index % 20 == 0:
            print(f"step {index} loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


model = Forecast()
trainer = L.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[Refresh()],
)
trainer.fit(model, DataLoader(Market(), BATCH))
print(f"final loss {np.mean(model.losses[-15:]):.4f}")
