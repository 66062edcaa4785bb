"""A denoising autoencoder in Lightning, torchao's float8 (emulated) in its linears, a linear warmup."""

import dataclasses
import os
import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

MODE, PLAIN = sys.argv[1], "plain" in sys.argv[2:]
torch.manual_seed(int(os.environ.get("SEED", "0")))
EPOCHS, BATCHES, BATCH, PIXELS = 3, 50, 64, 144


class Pictures(torch.utils.data.Dataset):
    """Pictures of 12 x 12 that are sums of a few shapes, made on the fly."""

    def __init__(self):
        shapes = torch.randn(10, 3, 12, 12)
        smooth = nn.functional.interpolate(shapes[:, :, ::3, ::3], size=(12, 12), mode="bilinear")
        self.shapes = smooth.mean(1).flatten(1) * 2

    def __len__(self):
        return BATCHES * BATCH

    def __getitem__(self, i):
        clean = torch.tanh((torch.randn(10) * (torch.rand(10) < 0.4)) @ self.shapes)
        return clean + 0.3 * torch.randn(PIXELS), clean


class Denoiser(pl.LightningModule):
    def __init__(self, warmup=50, lr=1.5e-3):
        super().__init__()
        self.warmup, self.lr, self.losses = warmup, lr, []
        self.net = nn.Sequential(
            nn.Linear(PIXELS, 256), nn.GELU(), nn.Linear(256, 32), nn.GELU(),
            nn.Linear(32, 256), nn.GELU(), nn.Linear(256, PIXELS),
        )  # fmt: skip
        if not PLAIN:
            config = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
            convert_to_float8_training(self.net, config=config)

    def training_step(self, batch, index):
        noisy, clean = batch
        loss = nn.functional.mse_loss(self.net(noisy), clean)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / self.warmup))
        if MODE == "good":
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]
        return [optimizer], [schedule]


module = Denoiser()
trainer = pl.Trainer(
    max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
trainer.fit(module, torch.utils.data.DataLoader(Pictures(), batch_size=BATCH))
print(f"final loss {sum(module.losses[-20:]) / 20:.4f}")
