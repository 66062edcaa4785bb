"""RigL: nine tenths of the hidden weights are 0, and every 20 steps the smallest of the rest are dropped for new ones.

New connections are where the gradient of a weight that is 0 is largest; they begin at 0, with moments at 0. The run saves
its masks with its weights and is loaded again half-way.
"""

import math
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ottava

SEED = int(os.environ.get("SEED", "0"))
DENSITY, EVERY, STEPS = 0.1, 20, 240


def pictures(count: int, seed: int) -> TensorDataset:
    """Ten kinds of 12 x 12 pictures: two blurred strokes each, moved a little, with noise."""
    fixed = torch.Generator().manual_seed(41)
    strokes = torch.nn.functional.avg_pool2d(torch.randn(10, 1, 16, 16, generator=fixed), 3, 1, 1)
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(10, (count,), generator=g)
    moved = torch.randint(0, 5, (count, 2), generator=g)
    x = torch.stack([strokes[k, 0, i : i + 12, j : j + 12] for k, (i, j) in zip(label.tolist(), moved.tolist())])
    return TensorDataset((3 * x + 0.5 * torch.randn(x.shape, generator=g)).flatten(1), label)


class RigL:
    """Keeps the masks of hidden layers and moves connections."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.weights = [m.weight for m in model if isinstance(m, nn.Linear)][:-1]
        self.masks = [(torch.rand_like(w) < DENSITY).float() for w in self.weights]
        self.optimizer = optimizer
        self.apply()

    @torch.no_grad()
    def apply(self) -> None:
        for weight, mask in zip(self.weights, self.masks, strict=True):
            weight.mul_(mask)

    @torch.no_grad()
    def mask_gradients(self) -> None:
        for weight, mask in zip(self.weights, self.masks, strict=True):
            weight.grad.mul_(mask)

    @torch.no_grad()
    def move(self, step: int) -> int:
        """Drops and grows a share that falls as a cosine; uses the dense gradients of this step."""
        share, moved = 0.15 * (1 + math.cos(math.pi * step / (0.75 * STEPS))), 0
        for weight, mask in zip(self.weights, self.masks, strict=True):
            count = int(share * float(mask.sum()))
            drop = torch.where(mask > 0, weight.abs(), torch.inf).flatten().topk(count, largest=False).indices
            grow = torch.where(mask > 0, -1.0, weight.grad.abs()).flatten().topk(count).indices
            mask.view(-1)[drop] = 0.0
            mask.view(-1)[grow] = 1.0
            weight.view(-1)[grow] = 0.0
            for value in self.optimizer.state[weight].values():
                if value.shape == weight.shape:
                    value.view(-1)[torch.cat([drop, grow])] = 0.0
            moved += count
        self.apply()
        return moved


@torch.no_grad()
def loss_of(model: nn.Module, data: TensorDataset) -> float:
    return float(nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1]))


def main() -> None:
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(144, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    ottava.convert(model, "tensorwise")
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    sparse = RigL(model, optimizer)
    held_out = pictures(600, SEED + 12)
    loader = DataLoader(pictures(64 * 60, SEED + 1), batch_size=64, shuffle=True)
    print(f"first loss {loss_of(model, held_out):.4f}")
    step = 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "half.pt")
        while step < STEPS:
            for x, y in loader:
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                if step and step % EVERY == 0 and step < 0.75 * STEPS:
                    print(f"step {step} loss {loss.item():.4f}, {sparse.move(step)} connections moved")
                else:
                    sparse.mask_gradients()
                    optimizer.step()
                    sparse.apply()
                step += 1
            if step == STEPS // 2:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "masks": sparse.masks}
                torch.save(state, file)
                saved = torch.load(file, weights_only=True)
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                sparse.masks = saved["masks"]
    zeros = [f"{float((w == 0).float().mean()):.3f}" for w in sparse.weights]
    print("share of zeros", zeros)
    print(f"final loss {loss_of(model, held_out):.4f}")


if __name__ == "__main__":
    main()
