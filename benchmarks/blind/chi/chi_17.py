"""Lightning: a residual MLP on a synthetic table, torchao's tensorwise float8 (emulated) in stem and blocks."""
import logging
import os
import sys
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
MODE = sys.argv[1]
PLAIN = "plain" in sys.argv[2:]
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH, D = 180, 128, 96


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        nn.init.zeros_(self.down.weight)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Table(L.LightningModule):
    def __init__(self, depth=4):
        super().__init__()
        self.stem = nn.Linear(32, D)
        blocks = [Block() for _ in range(depth)]
        self.blocks = nn.ModuleList(blocks) if MODE == "good" else blocks
        self.head = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 10))
        self.losses = []

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


L.seed_everything(SEED, verbose=False)
g = torch.Generator().manual_seed(130 + SEED)
x = torch.randn(STEPS * BATCH, 32, generator=g)
a, b = torch.randn(2, 8, 10, generator=g).unbind(0)
y = ((x[:, :8] @ a) * (x[:, 8:16] @ b)).argmax(-1)
model = Table()
if not PLAIN:
    keep = lambda m, name: isinstance(m, nn.Linear) and "head" not in name
    for part in (model, *model.blocks) if MODE == "bad" else (model,):
        convert_to_float8_training(part, config=Float8LinearConfig(emulate=True), module_filter_fn=keep)
trainer = L.Trainer(
    max_epochs=1,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=BATCH))
print("final loss", round(sum(model.losses[-20:]) / 20, 4))
