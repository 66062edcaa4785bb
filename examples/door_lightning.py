"""Lightning's Trainer under an FP8 recipe: a plugin, a checkpoint with the histories of scales, and a resumed run.

python examples/door_lightning.py [RECIPE]      needs: pip install 'ottava[lightning]'; a few seconds on a CPU
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

import ottava
from ottava.doors.lightning import OttavaPrecision


class Net(pl.LightningModule):  # type: ignore[misc]
    """A small regression."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return (self.net(batch[0]) - batch[0].roll(1, -1)).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 3e-3)


def main(recipe: str = "delayed") -> list[float]:
    """Two epochs, and two more after a restart; returns the mean losses before and after."""
    data = torch.utils.data.TensorDataset(torch.randn(1024, 64, generator=torch.Generator().manual_seed(1)))
    batches = torch.utils.data.DataLoader(data, batch_size=64)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet["enable_checkpointing"] = False  # it saves by itself below
    losses = []
    with TemporaryDirectory() as folder:
        file = Path(folder, "half.ckpt")
        for epochs, start in ((2, None), (4, file)):
            model = Net()
            trainer = pl.Trainer(plugins=[OttavaPrecision(recipe)], max_epochs=epochs, accelerator="cpu", **quiet)
            trainer.fit(model, batches, ckpt_path=start, weights_only=False)
            losses.append(float(model.training_step([data.tensors[0]], 0).detach()))
            trainer.save_checkpoint(file)
    print(ottava.receipt(model))
    print(f"loss {losses[0]:.3f} after two epochs, {losses[1]:.3f} after two more")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
