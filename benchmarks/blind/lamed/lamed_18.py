"""Lightning, torchao's float8, cosine with warm restarts from a high learning rate."""
import dataclasses
import os
import sys
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

warnings.filterwarnings("ignore")
MODE, PLAIN = sys.argv[1], "plain" in sys.argv
SEED = int(os.environ.get("SEED", 0))
STEPS, BATCH = 160, 64


class Spirals(torch.utils.data.Dataset):
    """Which of four noisy spirals is the point on? Some labels are wrong."""

    def __init__(self):
        n = STEPS * BATCH
        self.label = torch.randint(0, 4, (n,))
        r = torch.rand(n) * 2 + 0.2
        angle = 2.2 * r + self.label * 1.57
        points = torch.stack([r * angle.cos(), r * angle.sin()], 1) + 0.08 * torch.randn(n, 2)
        self.x = torch.cat([torch.sin(points @ (torch.randn(2, 15) * 1.5)), points], 1)
        wrong = torch.rand(n) < 0.05
        self.label[wrong] = torch.randint(0, 4, (int(wrong.sum()),))

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.x[i], self.label[i]


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(17, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 4)
        )
        self.losses = []

    def training_step(self, batch, _):
        x, label = batch
        loss = nn.functional.cross_entropy(self.net(x), label)
        self.losses.append(loss.item())
        if len(self.losses) % 20 == 1:
            print(f"step {len(self.losses) - 1} loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        restarts = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=20, T_mult=2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": restarts, "interval": "step"}}


pl.seed_everything(SEED, verbose=False)
module = Net()
if not PLAIN:
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    convert_to_float8_training(
        module.net, config=config, module_filter_fn=lambda m, name: isinstance(m, nn.Linear) and m.in_features == m.out_features
    )
trainer = pl.Trainer(
    max_steps=STEPS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, torch.utils.data.DataLoader(Spirals(), batch_size=BATCH))
print(f"final loss {sum(module.losses[-15:]) / 15:.4f}")
