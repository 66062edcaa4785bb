"""Lightning: a classifier of sensor windows; linears are ottava's. A sensor sometimes fails to reset."""

import os
import sys

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ottava

bad = sys.argv[1] == "bad"
plain = "plain" in sys.argv
seed = int(os.environ.get("SEED", 0))
L.seed_everything(seed, verbose=False)
torch.set_num_threads(1)

BATCH, STEPS, SENSORS, CLASSES = 64, 150, 64, 6


class Windows(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(SENSORS, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, CLASSES)
        )
        if not plain:
            recipe = ottava.get_recipe("delayed", amax_history_len=1024 if bad else 16)
            ottava.convert(self.net, recipe)
        self.losses = []

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=2e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def windows(n):
    world = torch.Generator().manual_seed(21)
    w = torch.randn(SENSORS, CLASSES, generator=world) / 4
    x = torch.randn(n, SENSORS)
    y = (torch.tanh(x) @ w + 0.3 * torch.randn(n, CLASSES)).argmax(1)
    x[25 * BATCH + 3, 17] = 3e7
    x[25 * BATCH + 9, 40] = -8e6
    return TensorDataset(x, y)


model = Windows()
data = DataLoader(windows(STEPS * BATCH), batch_size=BATCH)
trainer = L.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, gradient_clip_val=1.0,
)
trainer.fit(model, data)
for step in range(0, STEPS, 10):
    print(f"step {step} loss {model.losses[step]:.4f}")
print(f"final loss {sum(model.losses[-15:]) / 15:.4f}")
