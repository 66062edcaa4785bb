"""AdamW's kernel against the formula of torch's foreach kernels on a GPU, bit by bit; on a GPU with -m gpu."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ottava.kernels.triton import step as triton_step
from ottava.kernels.triton.step import TableRow, Tables, step_adamw
from ottava.optim.storage import _split, join
from sweep import sweep
from triton_mode import DEVICE, with_triton
from witnesses import fused_multiply_add

pytestmark = with_triton()
OPTIONS = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


def on_device(number: float) -> Tensor:
    return torch.tensor(number, device=DEVICE)


def stepped(*tensors: Any, step: float | Tensor = 1, **options: Any) -> None:
    """One step of one parameter."""
    step_adamw([TableRow(*tensors, step)], Tables(), **{**OPTIONS, **options})


def expected(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: int, lr: float, betas: tuple[float, float]
) -> list[Tensor]:
    """Weight, mean and square of fp32 numbers after a step with eps 1e-8 and weight decay 0.1, in numpy."""
    beta1, beta2 = betas
    w, g, m, v = (x.cpu().float().numpy() for x in (weight, gradient, mean, square))
    share, size = np.float32(1 - beta1), np.float32(-(lr / (1 - beta1**step)))
    with np.errstate(all="ignore"):
        near = share < np.float32(0.5)
        m = fused_multiply_add(share if near else share - np.float32(1), g - m, m if near else g)
        v = fused_multiply_add(np.float32(1 - beta2), g * g, v * np.float32(beta2))
        ratio = m / (np.sqrt(v) / np.float32((1 - beta2**step) ** 0.5) + np.float32(1e-8))
        w = fused_multiply_add(size, ratio, w * np.float32(1 - lr * 0.1))
    return [torch.from_numpy(np.asarray(x)) for x in (w, m, v)]


@sweep(
    kind=("plain", "master", "remainder"),
    moments=(torch.float32, torch.bfloat16),
    how=(((0.9, 0.999), True), ((0.9, 0.999), False), ((0.3, 0.5), False), ((0.0, 0.0), True)),
)
def test_bits_are_those_of_torchs_kernels_on_a_gpu(
    kind: str, moments: torch.dtype, how: tuple[tuple[float, float], bool]
) -> None:
    """Odd, empty and single shapes; zeros, subnormals, infinities and NaN among the gradients; three steps each.

    how: betas, and whether step and lr lie on the device.
    """
    betas, read = how
    lr = float(torch.tensor(1e-2)) if read else 1e-2
    for shape in ((33, 65), (1,), (), (0, 3)):
        master = torch.randn(shape)
        weight = master.clone() if kind == "plain" else master.bfloat16()
        extra = None if kind == "plain" else master.clone()
        if kind == "remainder":
            extra = torch.empty(shape, dtype=torch.int16)
            _split(master, weight, extra)
        mean, square = torch.zeros(shape, dtype=moments), torch.zeros(shape, dtype=moments)
        weight, extra, mean, square = (None if x is None else x.to(DEVICE) for x in (weight, extra, mean, square))
        for step in (1, 2, 3):
            gradient = torch.randn(shape) * 10 ** torch.randn(shape)
            if gradient.numel() > 8:
                odd = torch.tensor([0.0, -0.0, 1e-45, -1e-39, 3e38, float("inf"), -float("inf"), float("nan")])
                gradient.view(-1)[:8] = odd
            gradient = gradient.to(weight.dtype).to(DEVICE)
            master, *states = expected(master, gradient, mean, square, step, lr, betas)
            before = weight._version
            now = {"step": on_device(float(step)), "lr": on_device(lr)} if read else {"step": step, "lr": lr}
            stepped(weight, extra, gradient, mean, square, **now, betas=betas, weight_decay=0.1)
            assert weight._version == before + (weight.numel() > 0)
            found = [mean, square, join(weight, extra) if kind == "remainder" else weight if extra is None else extra]
            wanted = [*(x.to(moments) for x in states), master]
            if kind != "plain":
                found.append(weight)
                upper = torch.empty_like(weight, device="cpu")
                _split(master, upper, torch.empty(shape, dtype=torch.int16))
                wanted.append(upper if kind == "remainder" else master.bfloat16())
            for one, other in zip(found, wanted, strict=True):
                assert torch.equal(one.cpu().nan_to_num(7.0), other.nan_to_num(7.0))
                assert torch.equal(one.cpu().isnan(), other.isnan())


def test_what_was_written_is_the_weight() -> None:
    """A step with lr 0 after half of a weight was zeroed: masters follow there, and keep their bits elsewhere."""
    master = torch.randn(64)
    for remainder in (False, True):
        weight, extra = master.bfloat16(), master.clone()
        if remainder:
            extra = torch.empty(64, dtype=torch.int16)
            _split(master, weight, extra)
        weight[:32] = 0.0
        weight, extra, ones = weight.to(DEVICE), extra.to(DEVICE), torch.ones(64, device=DEVICE)
        stepped(weight, extra, ones, ones.clone(), ones.clone())
        found = (join(weight, extra) if remainder else extra).cpu()
        assert torch.equal(found[32:], master[32:])
        assert float(found[:32].abs().max()) <= (2.0**-133 if remainder else 0.0)
        assert not weight[:32].any()


def test_ties_and_every_nan_are_split_as_torch_splits_them() -> None:
    """A step with lr 0 keeps the master: ties of both signs and parities, the largest NaN, and zero."""
    upper = torch.tensor([0x3F80, 0x3F81, -0x4080, -0x407F, 0x7FFF, 0x0000], dtype=torch.int16)
    remainder = torch.tensor([-0x8000, -0x8000, -0x8000, -0x8000, 0x7FFF, 0], dtype=torch.int16)
    weight = upper.view(torch.bfloat16).clone()
    wanted, kept = weight.clone(), remainder.clone()
    _split(join(weight, remainder), wanted, kept)
    assert torch.equal(kept[:4], remainder[:4])
    weight, remainder, ones = weight.to(DEVICE), remainder.to(DEVICE), torch.ones(6, device=DEVICE)
    stepped(weight, remainder, ones, ones.clone(), ones.clone(), weight_decay=0.1)
    assert torch.equal(weight.view(torch.int16).cpu(), wanted.view(torch.int16))
    assert torch.equal(remainder.cpu(), kept)


def some_rows(steps: list[float], moments: torch.dtype = torch.float32) -> list[TableRow]:
    """Parameters of odd, empty, single and whole sizes, and one at an odd address."""
    torch.manual_seed(3)
    sizes = (1024, 7, 0, 1, 1025, 16, 3000, 2048, 33, 48)
    numbers = [[torch.randn(size + 1, device=DEVICE)[:size] for _ in range(4)] for size in sizes]
    numbers.append([torch.randn(65, device=DEVICE)[1:] for _ in range(4)])
    return [
        TableRow(weight, None, gradient, mean.to(moments), square.abs().to(moments), step)
        for (weight, gradient, mean, square), step in zip(numbers, steps, strict=True)
    ]


def results(rows: list[TableRow]) -> list[Tensor]:
    return [x.cpu() for row in rows for x in (row.weight, row.mean, row.square)]


@sweep(moments=(torch.float32, torch.bfloat16), read=(False, True), most=(256, 3))
def test_each_parameter_gets_what_it_gets_alone(moments: torch.dtype, read: bool, most: int) -> None:
    """In one launch for all of one class, or for a few; other numbers of steps only share one if they are read."""
    steps = [1.0, 1.0, 2.0, 1.0, 5.0, 2.0, 1.0, 1.0, 5.0, 1.0, 1.0]
    together, alone = some_rows(steps, moments), some_rows(steps, moments)
    options: dict[str, Any] = {**OPTIONS, "lr": 1e-2, "weight_decay": 0.1}
    launches = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_step, "_MOST_ROWS", most)
        make = triton_step.adamw_launch
        patch.setattr(triton_step, "adamw_launch", lambda *given: launches.append(given) or make(*given))
        step_adamw([row._replace(step=on_device(row.step)) if read else row for row in together], Tables(), **options)
    for row in alone:
        step_adamw([row], Tables(), **options)
    assert all(torch.equal(one, other) for one, other in zip(results(together), results(alone), strict=True))
    counts = (4, 6) if read else (3, 1, 4, 2)  # multiples of 16, and others, by their steps
    assert len(launches) == sum(-(-count // most) for count in counts)


def test_numbers_on_the_device_are_those_of_the_host() -> None:
    """To the bit, for usual betas, at any step up to a million (here a few).

    For a beta of 1 - 2**-20 an fp32 number may be the neighbour of the host's, once in 20,000 steps. Then an update
    differs by 3 roundings, and the weight by one of its own.
    """
    steps = [float(t) for t in (*range(1, 9), *torch.logspace(1.2, 6, 16).long().tolist())]
    for beta2, slack in ((0.95, 0.0), (0.999, 0.0), (1 - 2.0**-20, 4 * 2.0**-24)):
        found = []
        for read in (False, True):
            torch.manual_seed(5)
            tensors = [[torch.randn(16, device=DEVICE) for _ in range(4)] for _ in steps]
            rows = [
                TableRow(w, None, g, m, v.abs(), on_device(t) if read else t)
                for (w, g, m, v), t in zip(tensors, steps, strict=True)
            ]
            step_adamw(rows, Tables(), lr=1e-3, betas=(0.9, beta2), eps=1e-8, weight_decay=0.1)
            found.append(torch.cat([row.weight for row in rows]).cpu())
        assert float((found[0] - found[1]).abs().max()) <= slack * float(found[0].abs().max())


def test_a_table_is_made_anew_only_where_a_number_changed() -> None:
    """And never written again: a launch, or a graph, that reads the old one may still be to come."""
    tables, device = Tables(), torch.device(DEVICE)
    first = tables.get(("weights",), [2**62 + 1, 0, 16], device)
    assert first.tolist() == [2**62 + 1, 0, 16]
    assert tables.get(("weights",), [2**62 + 1, 0, 16], device) is first
    assert tables.get(("gradients",), [3], device).tolist() == [3]
    assert tables.get(("weights",), [2**62 + 1, 0], device).tolist() == [2**62 + 1, 0]
    assert first.tolist() == [2**62 + 1, 0, 16]


def test_a_graph_keeps_the_tables_that_it_reads_and_shares_none_that_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made under a capture is not there before a replay, so an eager step must not take it."""
    tables, device, captures = Tables(), torch.device("cuda"), []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(captures))
    monkeypatch.setattr(torch, "zeros", lambda count, **_: torch.tensor([0] * count))  # there may be no such device
    before = tables.get(("weights",), [1, 2], device)
    captures.append(True)
    assert tables.get(("weights",), [1, 2], device) is before
    inside = tables.get(("gradients",), [3], device)
    assert tables.get(("gradients",), [3], device) is not inside
    captures.clear()
    assert tables.get(("gradients",), [3], device) is not inside
    assert tables.get(("weights",), [4, 5], device) is not before
    assert any(one is before for one in tables._held)
