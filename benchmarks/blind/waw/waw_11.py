"""Noise2Noise in Lightning: a small CNN cleans pictures and never sees a clean one, its targets are as noisy as its
inputs.

The loss stays near the variance of the noise, 0.25, from the third epoch on, while pictures get cleaner. The rate
falls in steps.
"""

import os

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F

SEED = int(os.environ.get("SEED", "0"))
SIZE, NOISE = 16, 0.5


def pictures(number, generator):
    """Two soft blobs, bright or dark, and a ramp."""
    y, x = torch.meshgrid(torch.arange(SIZE) / SIZE, torch.arange(SIZE) / SIZE, indexing="ij")
    made = torch.zeros(number, 1, SIZE, SIZE)
    for _ in range(2):
        centre = torch.rand(number, 2, 1, 1, generator=generator)
        sign = 2.0 * torch.randint(0, 2, (number, 1, 1), generator=generator) - 1
        made[:, 0] += 1.5 * sign * torch.exp(-((y - centre[:, 0]) ** 2 + (x - centre[:, 1]) ** 2) / 0.03)
    slope = torch.randn(number, 1, 1, generator=generator)
    return made + (slope * (x - 0.5))[:, None]


class Pairs(torch.utils.data.Dataset):
    """Each look at a picture has fresh noise on both sides."""

    def __init__(self, clean):
        self.clean = clean

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, i):
        picture = self.clean[i]
        return picture + NOISE * torch.randn_like(picture), picture + NOISE * torch.randn_like(picture)


class Cleaner(pl.LightningModule):
    """Residual convolutions; the last layer begins at 0, so the first answer is the input."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=2, dilation=2), nn.ReLU(),
            nn.Conv2d(24, 24, 3, padding=4, dilation=4), nn.ReLU(), nn.Conv2d(24, 1, 3, padding=1),
        )
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        return x - self.net(x)

    def training_step(self, batch, number):
        loss = F.mse_loss(self(batch[0]), batch[1])
        if number % 16 == 0:
            print(self.global_step, round(loss.item(), 4))
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 4e-3)
        rate = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 4], gamma=0.3)
        return [optimizer], [rate]


@torch.no_grad()
def evaluate(model, clean, noisy):
    """Mean squared distance to clean pictures."""
    return F.mse_loss(model(noisy), clean).item()


def main():
    pl.seed_everything(SEED, verbose=False)
    generator = torch.Generator().manual_seed(71 + SEED)
    train, clean = pictures(1024, generator), pictures(200, generator)
    noisy = clean + NOISE * torch.randn(clean.shape, generator=generator)
    loader = torch.utils.data.DataLoader(Pairs(train), batch_size=32, shuffle=True)
    model = Cleaner()
    print("first loss", round(evaluate(model, clean, noisy), 4))
    trainer = pl.Trainer(
        max_epochs=5, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, gradient_clip_val=1.0,
    )
    trainer.fit(model, loader)
    print("final loss", round(evaluate(model, clean, noisy), 4))


if __name__ == "__main__":
    main()
