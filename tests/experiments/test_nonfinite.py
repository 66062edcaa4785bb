"""The first operation with a result that is not finite has a name."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import ottava
from ottava.record.reader import Run


class Masked(nn.Module):
    """Attention scores with a mask of -inf, which is no fault, and a square root, which may be."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 16), nn.Softmax(-1), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.up(x).masked_fill(torch.eye(16, dtype=torch.bool)[: len(x)], float("-inf"))
        return self.down(self.act(scores))


def first(folder: Path, fault: str) -> list[dict[str, object]]:
    torch.manual_seed(0)
    net = Masked()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with ottava.watch(net, folder) as watch:
        for step in range(1, 9):
            x = torch.randn(16, 16)
            y = net(x * 1e38 if fault == "overflow" and step >= 4 else x)
            loss = (y - y.detach()).abs().sqrt().sum() if fault == "sqrt" and step >= 4 else y.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [line for line in Run.open(watch.folder).experiments if line["kind"] == "nonfinite"]


def test_an_overflow_is_found_where_it_begins(tmp_path: Path) -> None:
    (line,) = first(tmp_path / "run", "overflow")
    assert (line["module"], line["direction"], line["first"]) == ("up", "forward", True)
    assert line["operation"] in ("addmm", "mm")


def test_a_gradient_is_found_in_the_backward(tmp_path: Path) -> None:
    (line,) = first(tmp_path / "run", "sqrt")
    assert line["direction"] == "backward"
    assert line["operation"] in ("div", "mul", "pow", "sqrt_backward")


def test_a_mask_is_no_fault(tmp_path: Path) -> None:
    assert first(tmp_path / "run", "") == []
