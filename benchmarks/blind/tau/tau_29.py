"""Denoiser in Lightning with an average of the weights for validation; FP8 matmuls by hand."""
import logging
import os
import sys
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VARIANT, PLAIN, SEED = sys.argv[1], "plain" in sys.argv, int(os.environ.get("SEED", 0))
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Tensorwise(torch.autograd.Function):
    @staticmethod
    def quantize(t, dtype, top):
        s = t.abs().max().clamp_min(1e-30) / top
        return (t / s).to(dtype).to(t.dtype) * s

    @staticmethod
    def forward(ctx, x, w):
        x, w = Tensorwise.quantize(x, torch.float8_e4m3fn, 448), Tensorwise.quantize(w, torch.float8_e4m3fn, 448)
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = Tensorwise.quantize(dy, torch.float8_e5m2, 57344)
        return dy @ w, dy.t() @ x


class Linear(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else Tensorwise.apply(x, self.weight) + self.bias


class WeightAverage(pl.Callback):
    """Keeps an exponential average of the weights, and validates with it."""

    def __init__(self, decay=0.95):
        self.decay, self.average, self.backup = decay, None, None

    def on_train_batch_end(self, trainer, module, *_):
        with torch.no_grad():
            if self.average is None:
                self.average = {k: v.clone() for k, v in module.state_dict().items()}
            for k, v in module.state_dict().items():
                self.average[k].lerp_(v, 1 - self.decay)

    def on_validation_start(self, trainer, module):
        if self.average is not None:
            self.backup = {k: v.clone() for k, v in module.state_dict().items()} if VARIANT == "good" else module.state_dict()
            module.load_state_dict(self.average)

    def on_validation_end(self, trainer, module):
        if self.backup is not None:
            module.load_state_dict(self.backup)
            self.backup = None


class Denoiser(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(Linear(48, 128), nn.SiLU(), Linear(128, 128), nn.SiLU(), Linear(128, 48))
        self.losses = []

    def training_step(self, batch, _):
        noisy, clean = batch
        loss = (self.net(noisy) - clean).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, _):
        noisy, clean = batch
        self.log("val_loss", (self.net(noisy) - clean).square().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1.5e-3)


pl.seed_everything(SEED, verbose=False)
basis = torch.randn(4, 48, generator=torch.Generator().manual_seed(1)) / 2


def samples(n):
    clean = torch.sin(torch.randn(n, 4) @ basis)
    return TensorDataset(clean + 0.1 * torch.randn(n, 48), clean)


net = Denoiser()
trainer = pl.Trainer(max_steps=100, val_check_interval=4, accelerator="cpu", logger=False, enable_checkpointing=False, num_sanity_val_steps=0,
                     enable_progress_bar=False, enable_model_summary=False, callbacks=[WeightAverage()])
trainer.fit(net, DataLoader(samples(100 * 64), batch_size=64, shuffle=True), DataLoader(samples(128), batch_size=128))
print(f"final loss {sum(net.losses[-10:]) / 10:.5f}")
