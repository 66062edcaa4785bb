"""Regression on data with wild outliers: a few targets in a thousand are far off. Lightning clips by norm."""

import os
import sys

import lightning.pytorch as pl
import torch
from torch import nn

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
torch.manual_seed(int(os.environ.get("SEED", "0")))
BATCH, STEPS = 64, 180
slope = torch.randn(20, 6) / 3


def records(n):
    x = torch.randn(n, 20)
    y = torch.sin(x @ slope).sum(1)
    heavy = torch.distributions.StudentT(1.6).sample((n,))
    return torch.utils.data.TensorDataset(x, y + 0.4 * heavy)


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(20, 96),
            nn.LayerNorm(96),
            nn.GELU(),
            nn.Linear(96, 96),
            nn.LayerNorm(96),
            nn.GELU(),
            nn.Linear(96, 1),
        )

    def forward(self, x):
        return self.layers(x).squeeze(1)


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body, self.losses = Body(), []

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.body(x), y)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


module = Regression()
trainer = pl.Trainer(
    max_steps=STEPS,
    accelerator="cpu",
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, torch.utils.data.DataLoader(records(BATCH * STEPS), batch_size=BATCH, shuffle=True))
for at in range(0, STEPS, 30):
    print(at, f"{sum(module.losses[at : at + 30]) / 30:.4f}")
last = sorted(module.losses[-31:])
print("median of the last 31 losses:")
print(f"final loss {last[15]:.4f}")
