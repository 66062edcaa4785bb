"""Plain SGD with momentum at a large learning rate on a small network, under Lightning."""
import logging
import os
import sys
import warnings

import lightning.pytorch as pl
import torch
import torch.nn as nn

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
mode, plain = sys.argv[1], "plain" in sys.argv
pl.seed_everything(int(os.environ.get("SEED", 0)), verbose=False)
CLASSES, STEPS = 12, 180


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(32, 128), nn.LayerNorm(128), nn.Tanh(), nn.Linear(128, 128), nn.LayerNorm(128), nn.Tanh(),
            nn.Linear(128, CLASSES),
        )
        self.losses = []

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.6, momentum=0.8)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [90, 140], gamma=0.2)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Kinds(torch.utils.data.Dataset):
    def __init__(self, n):
        self.centers = torch.randn(CLASSES * 3, 32)
        self.kind = torch.randint(0, CLASSES * 3, (n,))
        self.noise = torch.randn(n, 32) * 1.2

    def __len__(self):
        return len(self.kind)

    def __getitem__(self, i):
        return self.centers[self.kind[i]] + self.noise[i], self.kind[i] % CLASSES


loader = torch.utils.data.DataLoader(Kinds(64 * STEPS), batch_size=64, shuffle=True)
model = Net()
trainer = pl.Trainer(
    max_steps=STEPS, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(model, loader)
print(f"final loss {sum(model.losses[-20:]) / 20:.4f}")
