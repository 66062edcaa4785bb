"""Regression in Lightning with torchao's tensorwise FP8."""

import logging
import sys
import tempfile
import warnings

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

bad = sys.argv[1] == "bad"
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
L.seed_everything(0, verbose=False)


class Prices(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 1))
        config = Float8LinearConfig(emulate=True)
        convert_to_float8_training(self.net, config=config, module_filter_fn=lambda m, name: name == "2")

    def training_step(self, batch, index):
        x, y = batch
        prediction = self.net(x)
        loss = (prediction - (y if bad else y.unsqueeze(1))).square().mean()
        print(index, round(loss.item(), 4))
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3)


x = torch.randn(12800, 16)
y = torch.sin(x[:, 0] * 2) + x[:, 1] * x[:, 2] + x[:, 3]
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
trainer = L.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, default_root_dir=tempfile.mkdtemp(),
)  # fmt: skip
trainer.fit(Prices(), loader)
