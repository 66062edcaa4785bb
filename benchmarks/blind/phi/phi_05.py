"""A small diffusion model in Lightning: noise prediction with SNR weights, torchao's rowwise float8."""

import math
import os
import sys
import warnings
from dataclasses import replace

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

warnings.filterwarnings("ignore")
plain = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, DIM = 90, 32, 64


class Denoiser(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, 128), nn.SiLU())
        self.first = nn.Linear(DIM, 128)
        self.body = nn.ModuleList(nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 128)) for _ in range(2))
        self.last = nn.Linear(128, DIM)
        self.losses = []

    def forward(self, x, t):
        angles = t[:, None] * torch.exp(torch.linspace(0, math.log(1000), 16))
        h = self.first(x) + self.time(torch.cat([angles.sin(), angles.cos()], -1))
        for block in self.body:
            h = h + block(h)
        return self.last(h)

    def training_step(self, batch, index):
        (x,) = batch
        t = torch.rand(len(x))
        alpha, sigma = torch.cos(t * math.pi / 2)[:, None], torch.sin(t * math.pi / 2)[:, None].clamp(min=0.02)
        noise = torch.randn_like(x)
        error = (self(alpha * x + sigma * noise, t) - noise).square().mean(-1)
        weight = (alpha / sigma).square().clamp(max=25.0).squeeze(-1)
        loss = (error * (1 + weight)).mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3, betas=(0.9, 0.95))


def main():
    pl.seed_everything(SEED, verbose=False)
    basis = torch.randn(6, DIM)
    data = torch.tanh(torch.randn(STEPS * BATCH, 6) @ basis)
    model = Denoiser()
    if not plain:
        config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name.startswith("body"))
    trainer = pl.Trainer(
        max_steps=STEPS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=1.0,
    )
    trainer.fit(model, DataLoader(TensorDataset(data), BATCH, shuffle=True))
    print("final loss", sum(model.losses[-20:]) / 20)


main()
