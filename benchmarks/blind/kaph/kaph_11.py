"""A hypernetwork in Lightning: it writes the weights of a small network for each wave, so those have no .grad of their own."""

import os
import warnings

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ottava.doors.lightning import OttavaPrecision

warnings.filterwarnings("ignore")
SEED = int(os.environ.get("SEED", "0"))
POINTS, HIDDEN = 48, 16
SIZES = [(HIDDEN, 1), (HIDDEN,), (HIDDEN, HIDDEN), (HIDDEN,), (1, HIDDEN), (1,)]
TOTAL = sum(torch.Size(size).numel() for size in SIZES)


class Waves(Dataset):
    """Sums of two sines; a network sees 48 noisy samples and is asked at 32 other places."""

    def __init__(self, count: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.size = 0.4 + torch.rand(count, 2, 1, generator=g)
        self.speed = torch.tensor([2.0, 4.0])[None, :, None] + torch.rand(count, 2, 1, generator=g)
        self.phase = 6.28 * torch.rand(count, 2, 1, generator=g)
        self.places = 2 * torch.rand(count, 32, generator=g) - 1
        self.noise = 0.05 * torch.randn(count, POINTS, generator=g)

    def __len__(self) -> int:
        return len(self.size)

    def at(self, index: int, x: Tensor) -> Tensor:
        return (self.size[index] * torch.sin(self.speed[index] * x + self.phase[index])).sum(0)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        seen = self.at(index, torch.linspace(-1, 1, POINTS)) + self.noise[index]
        return seen, self.places[index], self.at(index, self.places[index])


class Hyper(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(POINTS, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU())
        self.write = nn.Linear(128, TOTAL)
        nn.init.normal_(self.write.weight, std=0.02)  # small, around one network that all waves share
        with torch.no_grad():
            first = [torch.randn(size) / (1.0 if len(size) < 2 else size[1] ** 0.5) for size in SIZES]
            self.write.bias.copy_(torch.cat([part.flatten() for part in first]))

    def forward(self, seen: Tensor, x: Tensor) -> Tensor:
        """Runs each wave's network at its places."""
        flat = self.write(self.trunk(seen)).float()
        pieces = flat.split([torch.Size(size).numel() for size in SIZES], 1)
        w = [piece.view(-1, *size) for piece, size in zip(pieces, SIZES, strict=True)]
        h = x.unsqueeze(1)
        for k in (0, 2):
            h = torch.sin(3.0 * (w[k] @ h + w[k + 1].unsqueeze(-1)))
        return (w[4] @ h + w[5].unsqueeze(-1)).squeeze(1)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        seen, x, y = batch
        return (self(seen, x) - y).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 2e-3, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@torch.no_grad()
def error(model: Hyper, data: Waves) -> float:
    seen, x, y = (torch.stack(part) for part in zip(*(data[i] for i in range(len(data))), strict=True))
    model.eval()
    loss = float((model(seen, x) - y).square().mean())
    model.train()
    return loss


def main() -> None:
    pl.seed_everything(SEED, verbose=False)
    model, held_out = Hyper(), Waves(256, SEED + 70)
    print(f"first loss {error(model, held_out):.4f}")
    loader = DataLoader(Waves(2048, SEED + 1), batch_size=64, shuffle=True)
    trainer = pl.Trainer(
        max_epochs=8,
        accelerator="cpu",
        plugins=[OttavaPrecision("mxfp8")],
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    print(f"final loss {error(model, held_out):.4f}")


if __name__ == "__main__":
    main()
