"""Textures in Lightning with progressive resizing: pictures of 8, then 12, then 16 pixels, and FP8 casts by hand."""

import os
import sys

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, cross_entropy, interpolate
from torch.utils.data import DataLoader, TensorDataset

SEED = int(os.environ.get("SEED", 0))
SIZES = [8, 8, 12, 12, 16, 16]  # one a epoch


def textures(count: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Six classes by direction and pitch of a wave, in noise; one label in twenty is wrong."""
    labels = torch.randint(6, (count,), generator=source)
    angle = (labels % 3) * 1.05 + 0.15 * torch.randn(count, generator=source)
    pitch = torch.where(labels < 3, 0.55, 0.95)
    phase = 6.28 * torch.rand(count, 1, 1, generator=source)
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    across = columns * angle.cos()[:, None, None] + rows * angle.sin()[:, None, None]
    pictures = torch.sin(pitch[:, None, None] * across + phase) + 0.4 * torch.randn(count, 16, 16, generator=source)
    wrong = torch.rand(count, generator=source) < 0.05
    labels[wrong] = torch.randint(6, (int(wrong.sum()),), generator=source)
    return pictures[:, None], labels


def cast(numbers: Tensor) -> Tensor:
    """E4M3 and back, with one scale for the tensor."""
    scale = 448 / numbers.abs().amax().clamp_min(1e-12)
    return (numbers * scale).to(torch.float8_e4m3fn).to(numbers.dtype) / scale


class ThroughCast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, numbers: Tensor) -> Tensor:  # noqa: ANN001
        return cast(numbers)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # noqa: ANN001
        return gradient


class Conv8(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        x, weight = ThroughCast.apply(x), ThroughCast.apply(self.weight)
        return conv2d(x, weight, self.bias, self.stride, self.padding)


def block(inputs: int, outputs: int, stride: int, conv: type[nn.Conv2d] = Conv8) -> list[nn.Module]:
    return [conv(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


class Net(pl.LightningModule):
    def __init__(self, pictures: Tensor, labels: Tensor) -> None:
        super().__init__()
        self.data = (pictures, labels)
        layers = [*block(1, 16, 1, nn.Conv2d), *block(16, 32, 2), *block(32, 48, 2)]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 6))

    def train_dataloader(self) -> DataLoader:
        size = SIZES[self.current_epoch]
        pictures = interpolate(self.data[0], size, mode="bilinear", antialias=True)
        return DataLoader(TensorDataset(pictures, self.data[1]), batch_size=48, shuffle=True, drop_last=True)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = cross_entropy(self.net(batch[0]), batch[1])
        if index % 15 == 0:
            print(f"epoch {self.current_epoch}, {batch[0].shape[-1]} pixels: {float(loss.detach()):.3f}")
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.SGD(self.parameters(), 0.2, momentum=0.9, nesterov=True, weight_decay=5e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps, pct_start=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@torch.no_grad()
def held_out_loss(model: Net, pictures: Tensor, labels: Tensor) -> float:
    model.eval()
    loss = float(cross_entropy(model.net(pictures), labels))
    model.train()
    return loss


def main() -> None:
    pl.seed_everything(SEED)
    source = torch.Generator().manual_seed(1000 + SEED)
    model = Net(*textures(1440, source))
    test = textures(480, source)
    print(f"first loss {held_out_loss(model, *test):.4f}")
    trainer = pl.Trainer(
        max_epochs=len(SIZES), accelerator="cpu", reload_dataloaders_every_n_epochs=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(model)
    print(f"final loss {held_out_loss(model, *test):.4f}")


if __name__ == "__main__":
    if sys.argv[1:] not in (["good"], ["bad"]):
        raise SystemExit("usage: tet_10.py good|bad")
    main()
