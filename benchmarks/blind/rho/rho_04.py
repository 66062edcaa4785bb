"""Lightning: an MLP mixer on synthetic digits with a one-cycle schedule, under float8 of torchao."""
import dataclasses
import logging
import os
import sys
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

BAD = sys.argv[1] == "bad"
PLAIN = "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.manual_seed(SEED)
STEPS = 90
shapes = torch.randn(10, 16, 16).cumsum(1).cumsum(2)
shapes = (shapes - shapes.mean((1, 2), keepdim=True)) / shapes.std((1, 2), keepdim=True)


def draw(n):
    y = torch.randint(0, 10, (n,))
    x = torch.stack([shapes[c].roll((int(torch.randint(-2, 3, ())), int(torch.randint(-2, 3, ()))), (0, 1)) for c in y.tolist()])
    return x + 1.2 * torch.randn(n, 16, 16), y


class Mix(nn.Module):
    def __init__(self, tokens=16, wide=96):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.t1, self.t2 = nn.Linear(tokens, 32), nn.Linear(32, tokens)
        self.c1, self.c2 = nn.Linear(wide, 2 * wide), nn.Linear(2 * wide, wide)

    def forward(self, h):
        h = h + self.t2(F.gelu(self.t1(self.n1(h).transpose(1, 2)))).transpose(1, 2)
        return h + self.c2(F.gelu(self.c1(self.n2(h))))


class Digits(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(16, 96)
        self.body = nn.Sequential(Mix(), Mix())
        self.head = nn.Linear(96, 10)
        self.losses = []
        if not PLAIN:
            config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
            convert_to_float8_training(self.body, config=config)

    def training_step(self, batch, index):
        x, y = batch
        patches = x.reshape(-1, 4, 4, 4, 4).permute(0, 1, 3, 2, 4).reshape(-1, 16, 16)
        loss = F.cross_entropy(self.head(self.body(self.patch(patches)).mean(1)), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=STEPS, div_factor=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "epoch" if BAD else "step"}}


x, y = draw(32 * 45)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=32, shuffle=True)
digits = Digits()
trainer = pl.Trainer(max_steps=STEPS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                     enable_model_summary=False)
trainer.fit(digits, loader)
print(f"final loss {sum(digits.losses[-10:]) / 10:.4f}")
