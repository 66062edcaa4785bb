"""Six guesses of a path under accelerate: the best guess of a row learns, the others get (nearly) no gradient."""

import os
import sys
from dataclasses import replace

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

SEED = int(os.environ.get("SEED", 0))
GUESSES, AHEAD, STEPS = 6, 8, 240


def paths(count: int, source: torch.Generator) -> TensorDataset:
    """Where a car was in eight ticks, and where it goes: left, right, straight on, or it stops; nobody knows which."""
    speed = 0.5 + torch.rand(count, 1, generator=source)
    heading = 6.28 * torch.rand(count, 1, generator=source)
    ticks = torch.arange(-8.0, AHEAD)
    turn = torch.tensor([-0.2, 0.2, 0.0, 0.0])[torch.randint(4, (count, 1), generator=source)]
    stops = (turn == 0) & (torch.rand(count, 1, generator=source) < 0.3)
    angle = heading + turn * ticks.clamp_min(0)
    length = torch.where(stops, speed * 0.6 ** ticks.clamp_min(0), speed)
    moves = torch.stack([length * angle.cos(), length * angle.sin()], 2)
    moves = moves + 0.02 * torch.randn(moves.shape, generator=source)
    path = moves.cumsum(1)
    path = path - path[:, 7:8]
    return TensorDataset(path[:, :8].flatten(1), path[:, 8:].flatten(1))


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.LayerNorm(128))
        self.guesses = nn.Linear(128, GUESSES * AHEAD * 2)
        self.chances = nn.Linear(128, GUESSES)

    def forward(self, before: Tensor) -> tuple[Tensor, Tensor]:
        code = self.body(before)
        return self.guesses(code).unflatten(1, (GUESSES, -1)), self.chances(code)


def distances(guesses: Tensor, after: Tensor) -> Tensor:
    return (guesses - after[:, None]).square().mean(2)


@torch.no_grad()
def best_of_six(model: nn.Module, data: TensorDataset) -> float:
    """The mean squared distance of the best guess."""
    model.eval()
    before, after = data.tensors
    found = float(distances(model(before)[0], after).amin(1).mean())
    model.train()
    return found


def main() -> None:
    torch.manual_seed(SEED)
    source = torch.Generator().manual_seed(1100 + SEED)
    accelerator = Accelerator(cpu=True)
    model = Forecaster()
    config = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, name: name != "chances")
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.03 ** (step / STEPS))
    loader = DataLoader(paths(3840, source), batch_size=64, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    test = paths(600, source)
    print(f"first loss {best_of_six(model, test):.4f}")
    step = 0
    while step < STEPS:
        for before, after in loader:
            guesses, chances = model(before)
            found = distances(guesses, after)
            best = found.detach().argmin(1)
            # the winner takes nearly all at first and all later; the chances are told who won
            share = 0.3 * max(0, 1 - step / 60)
            weights = torch.full_like(found, share / GUESSES)
            weights[torch.arange(len(best)), best] += 1 - share
            loss = (weights * found).sum(1).mean() + 0.1 * nn.functional.cross_entropy(chances, best)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=False)
            if step % 40 == 0:
                won = torch.bincount(best, minlength=GUESSES).tolist()
                print(f"step {step}: {float(loss.detach()):.4f}, wins {won}, held out {best_of_six(model, test):.4f}")
            step += 1
    print(f"final loss {best_of_six(model, test):.4f}")


if __name__ == "__main__":
    if sys.argv[1:] not in (["good"], ["bad"]):
        raise SystemExit("usage: tet_11.py good|bad")
    main()
