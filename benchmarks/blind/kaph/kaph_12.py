"""Prototypical networks in Lightning: five classes with one example each, other classes in every step.

The loss swings with how alike the drawn classes are; SGD with Nesterov's momentum; classes of the test are new.
"""

import os
import warnings

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

warnings.filterwarnings("ignore")
SEED = int(os.environ.get("SEED", "0"))
WAYS, ASKED, FEATURES = 5, 10, 64


class Episodes(IterableDataset):
    """A class is a point on a curved sheet of six dimensions, its examples lie around it in 64 noisy features."""

    def __init__(self, count: int, classes: range, seed: int) -> None:
        fixed = torch.Generator().manual_seed(3)
        self.lift = torch.randn(6, 128, generator=fixed) * 1.2, torch.randn(128, FEATURES, generator=fixed) / 11
        self.centres = torch.randn(200, 6, generator=fixed)[classes.start : classes.stop]
        self.nuisance = torch.randn(8, FEATURES, generator=fixed)
        self.count, self.seed = count, seed

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        for _ in range(self.count):
            chosen = torch.randperm(len(self.centres), generator=g)[:WAYS]
            where = self.centres[chosen, None] + 0.25 * torch.randn(WAYS, 1 + ASKED, 6, generator=g)
            x = torch.tanh(where @ self.lift[0]) @ self.lift[1]
            yield x + 0.6 * torch.randn(WAYS, 1 + ASKED, 8, generator=g) @ self.nuisance


def to_fp8(x: Tensor, kind: torch.dtype) -> Tensor:
    scale = torch.finfo(kind).max / x.detach().abs().amax().clamp(min=1e-12).float()
    return (x.float() * scale).to(kind).float() / scale


class Cast(torch.autograd.Function):
    """y = x w.T with E4M3 operands; the gradient goes back in E5M2."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        x8, w8 = to_fp8(x, torch.float8_e4m3fn), to_fp8(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, w8)
        return x8 @ w8.T

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x8, w8 = ctx.saved_tensors
        g8 = to_fp8(grad, torch.float8_e5m2)
        return g8 @ w8, g8.T @ x8


class Linear8(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Cast.apply(x, self.weight) + self.bias


class ProtoNet(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 128), nn.ReLU(), Linear8(128, 128), nn.ReLU(), Linear8(128, 32)
        )

    def scores(self, episode: Tensor) -> tuple[Tensor, Tensor]:
        """Minus the squared distances of asked examples to the one example of each class."""
        codes = self.net(episode.flatten(0, 1)).view(WAYS, 1 + ASKED, -1)
        asked = codes[:, 1:].flatten(0, 1)
        return -torch.cdist(asked, codes[:, 0]).square(), torch.arange(WAYS).repeat_interleave(ASKED)

    def training_step(self, episode: Tensor, _: int) -> Tensor:
        return nn.functional.cross_entropy(*self.scores(episode))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9, nesterov=True)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.PolynomialLR(optimizer, 300), "interval": "step"}]


@torch.no_grad()
def error(model: ProtoNet) -> float:
    """The share of wrong answers in 100 episodes of classes that were never trained on."""
    model.eval()
    wrong = []
    for episode in Episodes(100, range(150, 200), 77):
        scores, labels = model.scores(episode)
        wrong.append((scores.argmax(1) != labels).float().mean())
    model.train()
    return float(torch.stack(wrong).mean())


def main() -> None:
    pl.seed_everything(SEED, verbose=False)
    model = ProtoNet()
    print(f"first loss {error(model):.4f}")
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(Episodes(300, range(150), SEED + 1), batch_size=None))
    print(f"final loss {error(model):.4f}")


if __name__ == "__main__":
    main()
