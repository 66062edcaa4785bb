"""A sensor classifier with batch norms in Lightning, torchao's tensorwise casts (emulated)."""
import logging
import os
import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

SEED = int(os.environ.get("SEED", "0"))
MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
MOMENTUM = 0.1 if MODE == "good" else 0.001


class Sensors(pl.LightningModule):
    def __init__(self, width=96):
        super().__init__()
        layers, last = [], 32
        for _ in range(3):
            layers += [nn.Linear(last, width, bias=False), nn.BatchNorm1d(width, momentum=MOMENTUM), nn.ReLU()]
            last = width
        self.net = nn.Sequential(*layers)
        self.head = nn.Linear(width, 8)
        if not PLAIN:
            convert_to_float8_training(
                self.net, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda m, name: isinstance(m, nn.Linear)
            )
        self.val = []

    def forward(self, x):
        return self.head(self.net(x))

    def training_step(self, batch, i):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        if i % 15 == 0:
            print(f"step {i} loss {loss.item():.4f}")
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.val.append(F.cross_entropy(self(x), y).item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


pl.seed_everything(SEED, verbose=False)
centers = torch.randn(24, 32)
pick = torch.randint(0, 24, (64 * 80 + 512,))
x = (centers[pick] + 0.6 * torch.randn(len(pick), 32)) * 4 + 7
y = pick % 8
train = torch.utils.data.TensorDataset(x[512:], y[512:])
held = torch.utils.data.TensorDataset(x[:512], y[:512])
net = Sensors()
trainer = pl.Trainer(
    max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, num_sanity_val_steps=0,
)
trainer.fit(
    net, torch.utils.data.DataLoader(train, batch_size=64, shuffle=True), torch.utils.data.DataLoader(held, batch_size=128)
)
print(f"final loss {sum(net.val) / len(net.val):.4f}")
