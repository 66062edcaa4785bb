"""The first operation with a result that is not finite has a name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ottava
from ottava.diagnose.diagnose import diagnose
from ottava.experiments.laboratory import Laboratory
from ottava.experiments.nonfinite import nan_in_graph
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


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("rate", "The learning rate of step 8 is not finite, and so are its weights."),
        ("between", "The backward of step 8 gave a finite gradient, and the optimizer got one that is not"),
        ("step", "Step 8 leaves weights that are not finite with lr 0.05, of a gradient of norm "),
        ("backward", "The gradient of step 8 is not finite, and its loss was"),
    ],
)
def test_the_part_of_a_step_that_loses_the_weights_is_named(where: str, said: str, tmp_path: Path) -> None:
    """One weight of a hidden column is lost: the loss that a ReLU leaves may stay finite."""

    class Step(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            done = super().step(closure)
            if where == "step" and number == 8:
                self.param_groups[0]["params"][0].data[0, 0] /= 0.0
            return done

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    optimizer = Step(net.parameters(), lr=0.05)
    with ottava.watch(net, tmp_path / "run"):
        for number in range(1, 15):
            x = torch.randn(32, 16)
            loss = (net(x) - x).square().mean()
            if where == "backward" and number == 8:
                net[0].bias.register_hook(lambda g: g / 0.0)
            optimizer.zero_grad()
            loss.backward()
            if where == "rate" and number == 8:
                optimizer.param_groups[0]["lr"] = float("nan")
            if where == "between" and number == 8:
                net[0].bias.grad[0] = float("inf")
            optimizer.step()
    answer = diagnose(Run.open(tmp_path / "run"))
    assert answer.findings, answer.sentence
    assert (answer.findings[0].id, answer.findings[0].steps) == ("M5", [8]), answer.sentence
    assert answer.findings[0].cause.startswith(said), answer.sentence


def test_an_overflow_is_found_where_it_begins(tmp_path: Path) -> None:
    (line,) = first(tmp_path / "run", "overflow")
    assert (line["module"], line["direction"], line["first"]) == ("up", "forward", True)
    assert line["operation"] in ("addmm", "mm")


class Normed(nn.Module):
    """A division by a norm that may be zero."""

    def __init__(self, recipe: str | None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32, bias=False), nn.Linear(32, 32)
        if recipe:
            ottava.convert(self, recipe)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h / h.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize("recipe", (None, "tensorwise"))
@pytest.mark.parametrize("checkpointed", (False, True))
def test_a_nan_in_any_step_is_read_from_the_graph_of_its_loss(
    tmp_path: Path, recipe: str | None, checkpointed: bool
) -> None:
    """Step 7 is no captured step, and its update ends all weights. What a checkpoint holds is not computed again."""
    torch.manual_seed(0)
    net = Normed(recipe)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    calls: list[int] = []
    net.up.register_forward_hook(lambda *_: calls.append(step))
    with ottava.watch(net, tmp_path / "run", shadow=1000) as watch:
        for step in range(1, 11):
            x = torch.randn(16, 32)
            x[3] *= step != 7
            y = checkpoint(net, x, use_reentrant=False) if checkpointed else net(x)
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = [line for line in Run.open(watch.folder).experiments if line["kind"] == "nonfinite"]
    if checkpointed:
        assert (found, calls.count(7)) == ([], 2)
        return
    (line,) = found
    assert (line["step"], line["operation"], line["behind"], line["before"]) == (7, "div", "up", "down")
    assert line["operand"] == "self = 0, other = 0"


NAN = torch.tensor(torch.nan)
GRAPHS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], str]] = {
    "sqrt": (torch.sqrt, torch.sum, "sqrt b c, self = -1"),
    "log": (lambda h: (h + 1).log(), torch.sum, "log b c, self = 0"),
    "exp": (lambda h: (h * 100).exp() / (h * 100).exp().sum(), torch.sum, "exp b c, self = 100"),
    "assigned": (lambda h: torch.cat([h, NAN.expand(4, 1)], 1)[:, 1:], torch.sum, "cat b c, "),
    "written": (
        lambda h: h.index_put((torch.tensor(0),), NAN),
        torch.sum,
        "index_put b c, self = 1, values of no layer",
    ),
    "hidden": (lambda h: h.masked_fill(h == h, -torch.inf).softmax(-1), torch.sum, "softmax or masked_fill b c, "),
    "masked": (
        lambda h: h.masked_fill(h < 0, -torch.inf).softmax(1),
        lambda y: (y - y.sum()).sqrt(),
        "sqrt c , self = -3",
    ),
    "given": (torch.neg, lambda y: y.mean() * NAN, "mul c , other holds NaN"),
    "added": (torch.neg, lambda y: y.square().mean() + NAN, "add c , self = 1, other of no layer"),
    "half": (torch.neg, lambda y: y.square().mean() / torch.tensor(0.0) * 0, "div c , self = 1, other = 0"),
    "endless": (torch.neg, lambda y: (y * 100).exp().mean(), "exp c , self = 100"),
    "unused": (torch.neg, lambda y: F.cross_entropy(y, torch.full((4,), -100)), "nll_loss c , "),
}


@pytest.mark.parametrize("fault", GRAPHS)
def test_the_graph_names_operation_operands_and_place(fault: str) -> None:
    """b hands 1 and -1 on, c hands on what it gets."""
    inside, loss, expected = GRAPHS[fault]
    b, c = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    for layer in (b, c):
        nn.init.eye_(layer.weight)
    names = {id(b.weight): "b.weight", id(c.weight): "c.weight"}
    y = loss(c(inside(b(torch.tensor([[1.0, -1.0]] * 4)))))
    found = nan_in_graph(y if y.dim() == 0 else y.sum(), lambda p: names.get(id(p), ""))
    assert found is not None
    said = f"{found['operation']} {found['behind']} {found['before']}, {found['operand']}"
    assert (said, found["first"]) == (expected, " or " not in expected)


def test_weights_that_are_lost_at_once_need_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where a loss is not read before its backward; on a CPU the recorded step itself is repeated."""
    (line,) = first(tmp_path / "on a CPU", "overflow", goes_on=False)
    assert (line["module"], line["step"]) == ("up", 4)
    monkeypatch.setattr(Laboratory, "backward", lambda self, *given: self._recorder and self._recorder.backward(*given))
    assert first(tmp_path / "without", "overflow", goes_on=False) == []
    why = [line["why"] for line in Run.open(tmp_path / "without").experiments if line["kind"] == "refused"]
    assert any("replay=20" in text for text in why)
    (line,) = first(tmp_path / "with", "overflow", goes_on=False, replay=2)
    assert (line["module"], line["step"]) == ("up", 4)


@pytest.mark.parametrize("since", (1, 2, 3, 7))
@pytest.mark.parametrize("what", ("log", "label"))
def test_a_loss_that_is_lost_from_an_early_step_on_has_its_operation(tmp_path: Path, since: int, what: str) -> None:
    """Recorded or not, and though no weight survives; a target that is NaN is nobody's operation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with ottava.watch(model, tmp_path):
        for step in range(1, 10):
            x = torch.randn(32, 16)
            y, p = x.sum(1), model(x)[:, 0]
            if step >= since and what == "label":
                y[3] = torch.nan
            if step >= since and what == "log":
                p = (p - p.detach().max() - 1).log()
            (p - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    (line,) = [line for line in Run.open(tmp_path).experiments if line["kind"] == "nonfinite"]
    assert (line["step"], line["behind"], line["brought"]) == (since, "2", what == "label")
    assert line["operation"] == ("log" if what == "log" else "sub")
    answer = diagnose(Run.open(tmp_path)).to_dict()
    (found,) = answer["findings"]
    assert f"is {line['operation']}, behind 2" in str(found)
    assert found["severity"] == "critical"


def test_a_gradient_is_found_in_the_backward(tmp_path: Path) -> None:
    (line,) = first(tmp_path / "run", "sqrt")
    assert line["direction"] == "backward"
    assert line["operation"] in ("div", "mul", "pow", "sqrt_backward")


def test_a_mask_is_no_fault(tmp_path: Path) -> None:
    assert first(tmp_path / "run", "") == []
