"""Population-based training: five networks with rates from 1e-5 to 0.3; every 30 steps the worst two copy the best two.

A copy takes weights, moments and a changed rate. Some members are bad on purpose until they are replaced. Casts by hand
in the hidden layer.
"""

import copy
import os
import random
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

SEED = int(os.environ.get("SEED", "0"))
RATES = [1e-5, 3e-4, 3e-3, 3e-2, 0.3]
STEPS, EVERY = 240, 30


def fp8(x: Tensor) -> Tensor:
    """E4M3 and back with the tensor's amax at 448, straight through for the gradient."""
    scale = 448.0 / x.detach().abs().amax().clamp(min=1e-12)
    return x + ((x.detach() * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale - x.detach())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.hidden, self.leave = nn.Linear(32, 96), nn.Linear(96, 96), nn.Linear(96, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.enter(x))
        h = torch.relu(nn.functional.linear(fp8(h), fp8(self.hidden.weight), self.hidden.bias))
        return self.leave(h)


def rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
    fixed = torch.Generator().manual_seed(2)
    w = torch.randn(32, 64, generator=fixed) / 5, torch.randn(64, 8, generator=fixed) / 3
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 32, generator=g)
    return x, (torch.tanh(2 * x @ w[0]) @ w[1] + 0.1 * torch.randn(count, 8, generator=g)).argmax(1)


@torch.no_grad()
def loss_of(net: Net, data: tuple[Tensor, Tensor]) -> float:
    return float(nn.functional.cross_entropy(net(data[0]), data[1]))


class Member:
    """A network with its optimizer."""

    def __init__(self, rate: float) -> None:
        self.net = Net()
        self.optimizer = torch.optim.Adam(self.net.parameters(), rate)

    @property
    def rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    def step(self, x: Tensor, y: Tensor) -> float:
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def become(self, file: Path, factor: float) -> None:
        """Loads another member's checkpoint and changes its rate."""
        saved = torch.load(file, weights_only=True)
        self.net.load_state_dict(saved["net"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.optimizer.param_groups[0]["lr"] = factor * saved["optimizer"]["param_groups"][0]["lr"]


def main() -> None:
    torch.manual_seed(SEED)
    draw = random.Random(SEED)
    x, y = rows(8000, SEED + 1)
    validation, test = rows(500, SEED + 2), rows(1000, SEED + 3)
    members = [Member(rate) for rate in RATES]
    first = sorted(loss_of(m.net, test) for m in members)[0]
    print(f"first loss {first:.4f}")
    with tempfile.TemporaryDirectory() as folder:
        for step in range(STEPS):
            batch = torch.randint(len(x), (64,))
            losses = [m.step(x[batch], y[batch]) for m in members]
            if step % 10 == 0:
                print(f"step {step} losses " + " ".join(f"{v:.3f}" for v in losses))
            if (step + 1) % EVERY == 0 and step + 1 < STEPS:
                order = sorted(members, key=lambda m: loss_of(m.net, validation))
                for good, poor in zip(order[:2], order[:-3:-1], strict=True):
                    file = Path(folder, "member.pt")
                    torch.save(
                        {"net": good.net.state_dict(), "optimizer": copy.deepcopy(good.optimizer.state_dict())}, file
                    )
                    poor.become(file, draw.choice([0.5, 0.8, 1.25]))
                print(f"step {step} rates " + " ".join(f"{m.rate:.5f}" for m in members))
    best = min(members, key=lambda m: loss_of(m.net, validation))
    print(f"final loss {loss_of(best.net, test):.4f}")


if __name__ == "__main__":
    main()
