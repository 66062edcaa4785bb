"""Trains a model under accelerate in FP8, saves, and goes on: `python examples/accelerate_fp8.py`, seconds on one core.

`accelerate launch examples/accelerate_fp8.py` runs it on several processes.
"""

import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ottava
from ottava.doors.accelerate import prepare


def main(folder: Path, epochs: int = 2) -> tuple[list[float], list[float]]:
    """The losses of the last epoch, and of the same epoch after the state was loaded again."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).bfloat16()
    x = torch.randn(256, 64).bfloat16()
    data = DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, data = prepare(accelerator, model, optimizer, data, recipe="delayed")

    def epoch() -> list[float]:
        losses = []
        for inputs, targets in data:
            loss = (model(inputs) - targets).float().square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    for _ in range(epochs):
        print(f"loss {epoch()[-1]:.4f}")
    accelerator.save_state(str(folder))
    first = epoch()
    accelerator.load_state(str(folder))  # weights, optimizer, and the histories of delayed scaling
    again = epoch()
    print(ottava.receipt(accelerator.unwrap_model(model)), f"\nthe same losses after loading: {first == again}")
    return first, again


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(Path(made))
