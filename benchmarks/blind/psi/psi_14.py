"""A residual MLP for tables under Lightning, with one cycle of the learning rate."""
import logging
import os
import sys
import warnings

import lightning.pytorch as pl
import torch
import torch.nn as nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
mode, plain = sys.argv[1], "plain" in sys.argv
pl.seed_everything(int(os.environ.get("SEED", 0)), verbose=False)
STEPS = 160


class Residual(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Table(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(20, 96)
        self.blocks = nn.Sequential(*(Residual(96) for _ in range(3)))
        self.head = nn.Linear(96, 1)
        self.losses = []

    def forward(self, x):
        return self.head(self.blocks(self.stem(x))).squeeze(-1)

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS)
        if mode == "bad":
            return [optimizer], [schedule]
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


x = torch.randn(20480, 20)
y = torch.sin(2 * x[:, 0]) * x[:, 1] + x[:, 2] * x[:, 3] + 0.5 * x[:, 4:8].abs().sum(-1)
y = (y - y.mean()) / y.std()
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=128, shuffle=True)

model = Table()
if not plain:
    config = Float8LinearConfig.from_recipe_name("tensorwise")
    object.__setattr__(config, "emulate", True)
    convert_to_float8_training(model.blocks, config=config)
trainer = pl.Trainer(
    max_steps=STEPS, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, gradient_clip_val=1.0,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(model, loader)
print(f"final loss {sum(model.losses[-20:]) / 20:.4f}")
