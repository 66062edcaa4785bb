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


def first(folder: Path, fault: str, *, goes_on: bool = True, **settings: int) -> list[dict[str, object]]:
    torch.manual_seed(0)
    net = Masked()
    with torch.no_grad():
        net.up.weight.mul_(10)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with ottava.watch(net, folder, **settings) as watch:
        for step in range(1, 9):
            x = torch.randn(16, 16)
            y = net(x.clamp(-3, 3) * 1e38 if fault == "overflow" and step >= 4 else x)
            loss = (y - y.detach()).abs().sqrt().sum() if fault == "sqrt" and step >= 4 else y.square().mean()
            loss.backward()
            for p in net.parameters() if goes_on else ():
                p.grad = p.grad.nan_to_num(0.0, 0.0, 0.0)
            optimizer.step()
            optimizer.zero_grad()
    return [line for line in Run.open(watch.folder).experiments if line["kind"] == "nonfinite"]


def test_an_overflow_is_found_where_it_begins(tmp_path: Path) -> None:
    (line,) = first(tmp_path / "run", "overflow")
    assert (line["module"], line["direction"], line["first"]) == ("up", "forward", True)
    assert line["operation"] in ("addmm", "mm")


def test_weights_that_are_lost_at_once_need_a_snapshot(tmp_path: Path) -> None:
    assert first(tmp_path / "without", "overflow", goes_on=False) == []
    why = [line["why"] for line in Run.open(tmp_path / "without").experiments if line["kind"] == "refused"]
    assert any("replay=20" in text for text in why)
    (line,) = first(tmp_path / "with", "overflow", goes_on=False, replay=2)
    assert (line["module"], line["step"]) == ("up", 4)


def test_a_gradient_is_found_in_the_backward(tmp_path: Path) -> None:
    (line,) = first(tmp_path / "run", "sqrt")
    assert line["direction"] == "backward"
    assert line["operation"] in ("div", "mul", "pow", "sqrt_backward")


def test_a_mask_is_no_fault(tmp_path: Path) -> None:
    assert first(tmp_path / "run", "") == []
