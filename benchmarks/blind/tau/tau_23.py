"""Diffusion with noise levels drawn a batch at a time: the loss depends on the draw. Lightning, ottava's row-wise recipe."""
import logging
import os
import sys
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ottava

PLAIN, SEED = "plain" in sys.argv, int(os.environ.get("SEED", 0))
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Diffusion(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.time, self.inp = nn.Linear(32, 128), nn.Linear(32, 128)
        self.mid, self.out = nn.Linear(128, 256), nn.Linear(256, 32)
        self.losses = []

    def forward(self, x, t):
        freq = torch.exp(torch.linspace(0, 4, 16))
        emb = torch.cat([torch.sin(t * freq), torch.cos(t * freq)], -1)
        return self.out(nn.functional.silu(self.mid(nn.functional.silu(self.inp(x) + self.time(emb)))))

    def training_step(self, batch, _):
        (x,) = batch
        t = torch.rand(()) ** 2 * torch.ones(len(x), 1)  # one level for the batch
        noise = torch.randn_like(x)
        loss = (self(x * (1 - t) + noise * t, t) - noise).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


pl.seed_everything(SEED, verbose=False)
net = Diffusion()
if not PLAIN:
    ottava.convert(net, "rowwise")
basis = torch.randn(3, 32, generator=torch.Generator().manual_seed(6))
data = TensorDataset(torch.tanh(torch.randn(100 * 32, 3) @ basis))
trainer = pl.Trainer(max_steps=100, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                     enable_model_summary=False, gradient_clip_val=1.0)
trainer.fit(net, DataLoader(data, batch_size=32, shuffle=True))
print(f"final loss {sum(net.losses[-10:]) / 10:.4f}")
