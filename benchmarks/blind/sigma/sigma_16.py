"""A two-task net in Lightning: a physics residual with a large weight and data, out of one output layer."""
import logging
import os
import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torchao.float8 import CastConfig, Float8LinearConfig, convert_to_float8_training

SEED = int(os.environ.get("SEED", "0"))
MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class TwoTasks(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU())
        self.out = nn.Linear(96, 32)
        if not PLAIN:
            if MODE == "good":
                config = Float8LinearConfig(
                    emulate=True, cast_config_grad_output=CastConfig(target_dtype=torch.float8_e5m2)
                )
            else:
                config = Float8LinearConfig(
                    emulate=True, cast_config_grad_output=CastConfig(target_dtype=torch.float8_e4m3fn)
                )
            convert_to_float8_training(self, config=config)
        self.tail = []

    def training_step(self, batch, _):
        x, physics, data = batch
        out = self.out(self.trunk(x))
        a = (out[:, :16] - physics).square().mean()
        b = (out[:, 16:] - data).square().mean()
        self.tail.append((a + b).item())
        return 1e7 * a + b

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


pl.seed_everything(SEED, verbose=False)
x = torch.randn(6400, 32)
physics = torch.tanh(x @ torch.randn(32, 16) / 6)
data = torch.tanh(x @ torch.randn(32, 16) / 6) + 1.0
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, physics, data), batch_size=64, shuffle=True)
net = TwoTasks()
trainer = pl.Trainer(
    max_steps=100, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, devices=1,
)
trainer.fit(net, loader)
print(f"final loss {sum(net.tail[-10:]) / 10:.4f}")
