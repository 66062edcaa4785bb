"""Price regression in Lightning; FP8 casts by hand in the hidden layers."""
import logging
import os
import sys
import warnings

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VARIANT, PLAIN, SEED = sys.argv[1], "plain" in sys.argv, int(os.environ.get("SEED", 0))
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def fake_fp8(t, dim=-1):
    scale = 448.0 / t.detach().abs().amax(dim, keepdim=True).clamp_min(1e-12)
    return t + ((t.detach() * scale).to(torch.float8_e4m3fn).to(t.dtype) / scale - t.detach())


class Hidden(nn.Linear):
    def forward(self, x):
        return super().forward(x) if PLAIN else F.linear(fake_fp8(x), fake_fp8(self.weight), self.bias)


class Prices(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(Hidden(20, 96), nn.GELU(), Hidden(96, 96), nn.GELU())
        self.head = nn.Linear(96, 1)
        self.losses = []

    def training_step(self, batch, _):
        x, y = batch
        out = self.head(self.body(x))
        if VARIANT == "good":
            out = out.squeeze(-1)
        loss = (out - y).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=80)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


pl.seed_everything(SEED, verbose=False)
x = torch.randn(80 * 96, 20)
w = torch.randn(20, generator=torch.Generator().manual_seed(3)) / 4
y = x @ w + 0.5 * torch.sin(2 * x[:, 0]) + 0.1 * torch.randn(len(x))
net = Prices()
trainer = pl.Trainer(max_steps=80, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                     enable_model_summary=False, gradient_clip_val=1.0)
trainer.fit(net, DataLoader(TensorDataset(x, y), batch_size=96, shuffle=True))
print(f"final loss {sum(net.losses[-10:]) / 10:.4f}")
