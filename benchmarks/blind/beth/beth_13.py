"""Lightning with stochastic weight averaging: a high rate at the end, and the mean of the weights is kept.

When averaging starts, the rate goes up again, from 0.025 to 0.08, and stays there: the training loss does not settle, and
what is evaluated at the end is the mean of the weights.
"""

import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ottava.doors.lightning import OttavaPrecision

SEED = int(os.environ.get("SEED", "0"))
FEATURES, CLASSES, EPOCHS = 64, 10, 12


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES)
        )

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x).float(), y)

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x).float(), y))

    def on_validation_epoch_end(self):
        print(f"epoch {self.current_epoch}: held-out {self.trainer.callback_metrics['val_loss']:.4f}")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=2e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def clouds(count: int, centres: torch.Tensor, g: torch.Generator) -> TensorDataset:
    """Each class has three centres, and a twentieth of the labels is wrong."""
    y = torch.randint(0, CLASSES, (count,), generator=g)
    which = torch.randint(0, centres.shape[1], (count,), generator=g)
    x = centres[y, which] + torch.randn(count, FEATURES, generator=g)
    wrong = torch.rand(count, generator=g) < 0.05
    y = torch.where(wrong, torch.randint(0, CLASSES, (count,), generator=g), y)
    return TensorDataset(x, y)


def main() -> None:
    pl.seed_everything(SEED, verbose=False)
    g = torch.Generator().manual_seed(SEED)
    centres = 0.7 * torch.randn(CLASSES, 3, FEATURES, generator=g)
    train = DataLoader(clouds(7680, centres, g), batch_size=384, shuffle=True)
    held = DataLoader(clouds(512, centres, g), batch_size=256)

    model = Classifier()
    average = StochasticWeightAveraging(swa_lrs=0.08, swa_epoch_start=8, annealing_epochs=2, annealing_strategy="linear")
    trainer = pl.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", plugins=[OttavaPrecision("delayed")], callbacks=[average], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )
    before = trainer.validate(model, held, verbose=False)[0]["val_loss"]
    print(f"first loss {before:.4f}")
    trainer.fit(model, train, held)
    after = trainer.validate(model, held, verbose=False)[0]["val_loss"]
    print(f"final loss {after:.4f}")


if __name__ == "__main__":
    main()
