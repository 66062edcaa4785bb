"""A residual MLP in Lightning whose FP8 weights are cached between micro-batches."""
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
F8 = torch.float8_e4m3fn


class WeightCache:
    """One cast a weight and optimizer step, however many micro-batches read it."""

    def __init__(self):
        self.key, self.codes, self.scale = None, None, None

    def get(self, w):
        key = (w.data_ptr(), w._version) if VARIANT == "good" else (w.data_ptr(), w.shape)
        if key != self.key:
            self.key, self.scale = key, w.abs().max() / 448
            self.codes = (w / self.scale).to(F8)
        return self.codes.to(w.dtype) * self.scale


class CachedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, cache):
        s = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
        xq, wq = (x / s).to(F8).to(x.dtype) * s, cache.get(w.detach())
        ctx.save_for_backward(xq, wq)
        return xq @ wq.t()

    @staticmethod
    def backward(ctx, dy):
        xq, wq = ctx.saved_tensors
        s = dy.abs().max().clamp_min(1e-30) / 57344
        dyq = (dy / s).to(torch.float8_e5m2).to(dy.dtype) * s
        return dyq @ wq, dyq.t() @ xq, None


class CachedLinear(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args, bias=False)
        self.cache = WeightCache()

    def forward(self, x):
        return super().forward(x) if PLAIN else CachedMatmul.apply(x, self.weight, self.cache)


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.inp, self.head = nn.Linear(24, 96), nn.Linear(96, 8)
        self.ups, self.downs = nn.ModuleList(CachedLinear(96, 192) for _ in range(2)), nn.ModuleList(CachedLinear(192, 96) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(96) for _ in range(2))
        self.losses = []

    def training_step(self, batch, _):
        x, y = batch
        h = self.inp(x)
        for norm, up, down in zip(self.norms, self.ups, self.downs):
            h = h + down(F.silu(up(norm(h))))
        loss = F.cross_entropy(self.head(h), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


pl.seed_everything(SEED, verbose=False)
net = Net()
x = torch.randn(80 * 2 * 64, 24)
y = ((x[:, 0] * x[:, 1] > 0).long() + 2 * (x[:, 2] * x[:, 3] > 0).long() + 4 * (x[:, 4:7].sum(1) > 0).long())
trainer = pl.Trainer(max_steps=80, accumulate_grad_batches=2, accelerator="cpu", logger=False, enable_checkpointing=False,
                     enable_progress_bar=False, enable_model_summary=False)
trainer.fit(net, DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True))
print(f"final loss {sum(net.losses[-20:]) / 20:.4f}")
