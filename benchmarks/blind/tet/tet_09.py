"""A conditional neural process in Lightning: curves from a few points, with a likelihood whose loss crosses 0."""

import os
import sys

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ottava.doors.lightning import OttavaPrecision

SEED = int(os.environ.get("SEED", 0))
POINTS = 40


def curves(count: int, source: torch.Generator) -> TensorDataset:
    """Sines of any phase and size; the places are drawn anew for each curve."""
    x = torch.rand(count, POINTS, 1, generator=source) * 4 - 2
    size, phase = (torch.rand(count, 1, 1, generator=source) for _ in range(2))
    return TensorDataset(x, (0.5 + size) * torch.sin(1.2 * x + 6.28 * phase))


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for one, other in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.Linear(one, other), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class NeuralProcess(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.read = mlp(2, 128, 128, 128)
        self.write = mlp(129, 128, 128, 2)
        self.tests: list[float] = []

    def loss(self, x: Tensor, y: Tensor, known: int) -> Tensor:
        """The first points are shown; all are asked for."""
        code = self.read(torch.cat([x, y], 2)[:, :known]).mean(1, keepdim=True)
        told = self.write(torch.cat([code.expand(-1, x.shape[1], -1), x], 2)).float()
        deviation = 0.02 + 0.98 * nn.functional.softplus(told[..., 1:])  # never below the bound
        return -torch.distributions.Normal(told[..., :1], deviation).log_prob(y).mean()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        known = int(torch.randint(1, 21, (1,)))  # from nearly nothing to half of the points
        return self.loss(*batch, known)

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("test", self.loss(*batch, 15))

    def on_validation_epoch_end(self) -> None:
        self.tests.append(float(self.trainer.callback_metrics["test"]))

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.RAdam(self.parameters(), 5e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    pl.seed_everything(SEED)
    source = torch.Generator().manual_seed(900 + SEED)
    training = DataLoader(curves(2560, source), batch_size=64, shuffle=True)
    test = DataLoader(curves(480, source), batch_size=240)
    model = NeuralProcess()
    trainer = pl.Trainer(
        plugins=[OttavaPrecision("mxfp8")], max_epochs=6, accelerator="cpu", gradient_clip_val=1.0, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.validate(model, test, verbose=False)
    print(f"first loss {model.tests[0]:.4f}")
    trainer.fit(model, training, test)
    print("held-out losses:", [round(loss, 3) for loss in model.tests], "in training mode:", model.training)
    print(f"final loss {model.tests[-1]:.4f}")


if __name__ == "__main__":
    if sys.argv[1:] not in (["good"], ["bad"]):
        raise SystemExit("usage: tet_09.py good|bad")
    main()
