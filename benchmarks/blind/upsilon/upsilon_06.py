"""Lightning with an average of the weights for validation."""

import logging
import os
import sys
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
MODE = sys.argv[1]
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", "0"))


class Average(pl.Callback):
    def __init__(self, decay=0.99):
        self.decay, self.average, self.backup = decay, None, None

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, *args):
        if self.average is None:
            self.average = {k: v.clone() for k, v in module.state_dict().items()}
        for k, v in module.state_dict().items():
            self.average[k].lerp_(v, 1 - self.decay)

    def on_validation_start(self, trainer, module):
        if self.average is not None:
            state = module.state_dict()
            self.backup = {k: v.clone() for k, v in state.items()} if MODE == "good" else dict(state)
            module.load_state_dict(self.average)

    def on_validation_end(self, trainer, module):
        if self.backup is not None:
            module.load_state_dict(self.backup)
            self.backup = None


class E4M3(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        scale = t.abs().amax().clamp(min=1e-12) / 448
        return (t / scale).to(torch.float8_e4m3fn).float() * scale

    @staticmethod
    def backward(ctx, grad):
        return grad


class Linear(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else nn.functional.linear(E4M3.apply(x), E4M3.apply(self.weight), self.bias)


class Regressor(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(Linear(32, 128), nn.SiLU(), Linear(128, 128), nn.SiLU(), nn.Linear(128, 8))
        self.losses = []

    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main():
    pl.seed_everything(SEED, verbose=False)
    teacher = nn.Sequential(nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 8)).requires_grad_(False)
    teacher[0].weight.mul_(3)
    x = torch.randn(6656, 32)
    y = 4 * teacher(x)
    train = DataLoader(TensorDataset(x[:6400], y[:6400]), batch_size=64, shuffle=True)
    valid = DataLoader(TensorDataset(x[6400:], y[6400:]), batch_size=256)
    model = Regressor()
    trainer = pl.Trainer(
        max_steps=100, val_check_interval=8, num_sanity_val_steps=0, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Average()],
    )
    trainer.fit(model, train, valid)
    print(f"final loss {sum(model.losses[-10:]) / 10:.4f}")


main()
