"""A differentiable synthesizer in Lightning: a network gives the loudness of harmonics, the loss compares spectra."""
import logging
import math
import os
import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ottava.doors.lightning import OttavaPrecision

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
SEED = int(os.environ.get("SEED", "0"))
pl.seed_everything(SEED, verbose=False)
HARMONICS, SAMPLES, RATE, KINDS = 12, 1024, 8000, 6
instrument = torch.rand(KINDS, HARMONICS) ** 2 / torch.arange(1, HARMONICS + 1)


def play(amplitude, pitch):
    """Sum of harmonics: amplitude (batch, harmonics), pitch (batch,) in hertz."""
    time = torch.arange(SAMPLES) / RATE
    number = torch.arange(1, HARMONICS + 1)
    angle = 2 * math.pi * pitch[:, None, None] * number[:, None] * time
    return (amplitude[..., None] * angle.sin()).sum(1)


def notes(count):
    kind = torch.randint(KINDS, (count,))
    pitch = 110 * 2 ** (torch.rand(count) * 1.5)
    loud = torch.rand(count) * 0.9 + 0.1
    bright = torch.exp(-(1 - loud)[:, None] * torch.arange(HARMONICS) * 0.3)
    return kind, pitch, loud, play(instrument[kind] * bright * loud[:, None], pitch)


def spectrum(wave, size):
    window = torch.hann_window(size)
    return torch.stft(wave, size, size // 4, window=window, return_complex=True).abs()


class Synth(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.kinds = nn.Embedding(KINDS, 30)
        self.net = nn.Sequential(
            nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, HARMONICS)
        )

    def step(self, batch):
        kind, pitch, loud, wave = batch
        x = torch.cat([self.kinds(kind), (pitch / 110).log2()[:, None], loud[:, None]], 1)
        made = play(2 * torch.sigmoid(self.net(x).float() - 2), pitch)
        loss = 0.0
        for size in (256, 128, 64):
            one, two = spectrum(made, size), spectrum(wave, size)
            loss = loss + (one - two).abs().mean() + ((one + 1e-3).log() - (two + 1e-3).log()).abs().mean()
        return loss

    def training_step(self, batch, _):
        return self.step(batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 2e-3)


held = notes(128)
model = Synth()
print("first loss %.4f" % model.step(held).item())
loader = DataLoader(TensorDataset(*notes(1024)), batch_size=16, shuffle=True)
trainer = pl.Trainer(
    plugins=[OttavaPrecision("blockwise")],
    callbacks=[GradientAccumulationScheduler({0: 1, 2: 2, 3: 4})],
    gradient_clip_val=0.5,
    max_epochs=4,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    enable_checkpointing=False,
)
trainer.fit(model, loader)
model.eval()
with torch.no_grad():
    print("final loss %.4f" % model.step(held).item())
