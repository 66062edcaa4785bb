"""Domain-adversarial training (DANN) in Lightning: labels from the old sensor alone, and a critic that must not know
the sensors apart.

The gradient of the critic is turned round, by a share that grows from 0 to 1. Its loss stays near ln 2: that is the
aim.
"""

import math
import os

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F

import ottava
from ottava.doors.lightning import OttavaPrecision

SEED = int(os.environ.get("SEED", "0"))
CLASSES, INPUTS, EPOCHS = 4, 32, 8


class Turn(torch.autograd.Function):
    """The identity, with its gradient times -share."""

    @staticmethod
    def forward(ctx, x, share):
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return -ctx.share * dy, None


class Dann(pl.LightningModule):
    """Features, classes, sensor."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.features = nn.Sequential(nn.Linear(INPUTS, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.classes = nn.Linear(64, CLASSES)
        self.critic = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch, _):
        old, labels, new = batch
        share = 2 / (1 + math.exp(-10 * self.global_step / self.steps)) - 1
        seen = self.features(torch.cat([old, new]))
        task = F.cross_entropy(self.classes(seen[: len(old)]), labels)
        said = self.critic(Turn.apply(seen, share)).squeeze(1)
        sensor = torch.cat([torch.zeros(len(old)), torch.ones(len(new))])
        confusion = F.binary_cross_entropy_with_logits(said, sensor)
        if self.global_step % 30 == 0:
            print(self.global_step, "task", round(task.item(), 4), "critic", round(confusion.item(), 4))
        return task + confusion

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.02, momentum=0.9, weight_decay=1e-4)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: (1 + 10 * s / self.steps) ** -0.75)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rate, "interval": "step"}}


def readings(number, generator, centres, mix, new):
    """The first half of the numbers tells the class with both sensors; the new one shifts the other half."""
    labels = torch.randint(0, CLASSES, (number,), generator=generator)
    x = centres[labels] + 0.7 * torch.randn(number, INPUTS, generator=generator)
    if new:
        x[:, INPUTS // 2 :] = centres[(labels + 1) % CLASSES, INPUTS // 2 :] * 0.6 + 1.0
        x[:, INPUTS // 2 :] += torch.randn(number, INPUTS // 2, generator=generator)
    return x @ mix, labels


@torch.no_grad()
def evaluate(model, x, labels):
    """Cross-entropy on the new sensor, whose labels the training never sees."""
    model.eval()
    loss = F.cross_entropy(model.classes(model.features(x)).float(), labels).item()
    model.train()
    return loss


def main():
    pl.seed_everything(SEED, verbose=False)
    generator = torch.Generator().manual_seed(7 + SEED)
    centres = 1.2 * torch.randn(CLASSES, INPUTS, generator=generator)
    centres[:, INPUTS // 2 :] *= 0.5
    mix = torch.linalg.qr(torch.randn(INPUTS, INPUTS, generator=generator))[0]
    old, labels = readings(2048, generator, centres, mix, new=False)
    new, _ = readings(2048, generator, centres, mix, new=True)
    held = readings(1000, generator, centres, mix, new=True)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(old, labels, new), batch_size=64, shuffle=True, drop_last=True
    )
    model = Dann(EPOCHS * len(loader))
    print("first loss", round(evaluate(model, *held), 4))
    trainer = pl.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, plugins=[OttavaPrecision("guarded")],
    )
    trainer.fit(model, loader)
    print(ottava.receipt(model))
    print("final loss", round(evaluate(model, *held), 4))


if __name__ == "__main__":
    main()
