"""The adding problem with a GRU: two numbers of a long row are marked, and their sum is wanted.

For a good while the network says the mean, and the loss stands at the variance, 1/6. Then it finds the marks. The best
weights are written to a file now and then; for the last 60 steps they are loaded again, with a quarter of the rate.
"""

import os
import tempfile

import torch
from torch import nn

SEED = int(os.environ.get("SEED", "0"))
LENGTH, WIDTH, BATCH, STEPS = 20, 64, 64, 300


def rows(count: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.rand(count, LENGTH, generator=g)
    marks = torch.zeros(count, LENGTH)
    half = LENGTH // 2
    marks[torch.arange(count), torch.randint(0, half, (count,), generator=g)] = 1
    marks[torch.arange(count), torch.randint(half, LENGTH, (count,), generator=g)] = 1
    return torch.stack([numbers, marks], -1), (numbers * marks).sum(1)


class Adder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, 1)
        with torch.no_grad():
            self.gru.bias_hh_l0[WIDTH : 2 * WIDTH].fill_(1.0)  # remember at first
            self.out.bias.fill_(1.0)  # the mean of the sums

    def forward(self, x):
        return self.out(self.gru(x)[0][:, -1])[:, 0]


def main() -> None:
    torch.manual_seed(SEED)
    g = torch.Generator().manual_seed(SEED)
    net = Adder()
    optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)
    held = rows(512, g)

    @torch.no_grad()
    def loss_of_held() -> float:
        return nn.functional.mse_loss(net(held[0]), held[1]).item()

    folder = tempfile.TemporaryDirectory()
    file, best = os.path.join(folder.name, "best.pt"), float("inf")
    print(f"first loss {loss_of_held():.4f}")
    for step in range(STEPS):
        if step % 20 == 0 and step <= STEPS - 60 and (now := loss_of_held()) < best:
            best = now
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, file)
        if step == STEPS - 60:
            kept = torch.load(file, weights_only=True)
            net.load_state_dict(kept["net"])
            optimizer.load_state_dict(kept["optimizer"])
            print(f"back to step {kept['step']}: {best:.4f}")
            for group in optimizer.param_groups:
                group["lr"] *= 0.25
        x, y = rows(BATCH, g)
        loss = nn.functional.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.2)
        optimizer.step()
        if step % 30 == 0:
            print(f"{step:4d}  {loss.item():.4f}")
    folder.cleanup()
    print(f"final loss {loss_of_held():.4f}")


if __name__ == "__main__":
    main()
