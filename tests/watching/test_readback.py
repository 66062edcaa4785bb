"""Numbers that arrive later than they were asked for, and a watch that does not wait for them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ottava.record.reader import Run
from ottava.watching.config import WatchConfig
from ottava.watching.readback import Reading
from ottava.watching.session import Watch, watch
from triton_mode import never_waits


class Late:
    """Numbers arrive `lag` steps after they were asked for; the reading is the real one."""

    def __init__(self, lag: int) -> None:
        self.lag, self.begun = lag, 0
        self.waited_for: list[int] = []
        """Steps whose numbers somebody wanted before they were there."""
        self.broken = False

    def __call__(self, tensors: Sequence[Tensor]) -> Reading:
        self.begun += 1
        return _Arriving(self, self.begun, Reading(tensors))


class _Arriving:
    def __init__(self, late: Late, step: int, reading: Reading) -> None:
        self.late, self.step, self.reading = late, step, reading

    def ready(self) -> bool:
        return self.late.begun >= self.step + self.late.lag

    def values(self) -> list[list[float]]:
        if not self.ready():
            self.late.waited_for.append(self.step)
        if self.late.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self.reading.values()


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).bfloat16()


class Loop:
    """A training loop that can be asked for some more steps; the batch of one step is three hundred times too large."""

    def __init__(self, model: nn.Module, poisoned: int = 0) -> None:
        self.model, self.poisoned, self.done = model, poisoned, 0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.done += 1
            x = torch.randn(48, 64, generator=torch.Generator().manual_seed(self.done)).bfloat16()
            x = x * 300 if self.done == self.poisoned else x
            (self.model(x) - x).float().square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def crash(self, seen: Watch, steps: int, late: Late | None = None) -> None:
        with seen:
            self.run(steps)
            if late is not None:
                late.broken = True
            raise ZeroDivisionError


def watched(folder: Path, read: Any, poisoned: int = 0, **settings: Any) -> tuple[Watch, Loop]:
    model = build()
    return Watch(model, folder, WatchConfig(**settings), read=read), Loop(model, poisoned)


def record(folder: Path) -> tuple[list[Any], list[Any]]:
    """What a run put down of its steps and casts, without times."""
    run = Run.open(folder)
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    rows = run.table(phase=None)
    keys = ("step", "phase", "layer", "tensor", "direction")
    seen = sorted(zip(*(rows[key].tolist() for key in keys), rows.metric("amax").tolist(), strict=True))
    return [(line["step"], line["loss"]) for line in lines], seen


def test_numbers_of_every_tensor_in_their_order() -> None:
    """Any shape, none at all, and what is no number."""
    found = Reading([torch.tensor([[1.0, 2.0], [3.0, math.inf]]), torch.empty(0), torch.tensor(0.5)])
    assert found.ready()
    assert found.values() == [[1.0, 2.0, 3.0, math.inf], [], [0.5]]
    assert Reading([]).values() == []


def test_what_is_read_is_of_the_moment_it_was_asked_for() -> None:
    """A loss that is written over afterwards stays what it was."""
    x = torch.ones(3)
    reading = Reading([x])
    x.zero_()
    assert reading.values() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize("lag", [1, 3])
def test_late_numbers_are_the_same_numbers_under_the_same_steps(lag: int, tmp_path: Path) -> None:
    """Losses, statistics, and amaxes that a crash puts on record, against a watch that reads at once."""
    for name, read in (("now", Reading), ("late", Late(lag))):
        seen, loop = watched(tmp_path / name, read, every=6)
        with pytest.raises(ZeroDivisionError):
            loop.crash(seen, 15)
    steps, rows = record(tmp_path / "late")
    assert (steps, rows) == record(tmp_path / "now")
    assert [step for step, _ in steps] == list(range(1, 16))
    assert {row[0] for row in rows if row[1] == "light"} == set(range(1, 16))


def test_nobody_waits_between_looks(tmp_path: Path) -> None:
    """A step is put down when its numbers arrive, two steps later; a look, a flush and the end wait for what is due."""
    late = Late(2)
    seen, loop = watched(tmp_path / "run", late, every=1000)

    def lines() -> int:
        return len((tmp_path / "run" / "steps.jsonl").read_text().splitlines())

    loop.run(8)
    assert lines() == 8  # 8 was looked at
    late.waited_for.clear()
    loop.run(4)
    assert (lines(), late.waited_for) == (10, [])
    seen.flush()
    assert (lines(), late.waited_for) == (12, [11, 12])
    loop.run(1)
    seen.close()
    assert (lines(), late.waited_for) == (13, [11, 12, 13])


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_trigger_names_its_step_and_bursts_from_now_on(lag: int, tmp_path: Path) -> None:
    """The burst is as long as ever, and begins where the spike became known."""
    seen, loop = watched(tmp_path / "run", Late(lag), 36, every=1000, triggers={"burst": 3}, flight=4)
    with seen:
        loop.run(46)
    run = Run.open(tmp_path / "run")
    kinds = [(event["kind"], event["step"]) for event in run.events if event["kind"] != "jump"]
    assert kinds[0] == ("trigger", 36)
    assert kinds[-1] == ("burst", 36 + lag)
    assert [step for step in sorted(set(run.table()["step"].tolist())) if step > 32] == [37 + lag, 38 + lag, 39 + lag]
    light = run.table(phase="light").where(layer="0", tensor="input")
    assert light["step"].tolist() == [33, 34, 35, 36]
    assert light.metric("amax")[-1] > 100 * light.metric("amax")[0]


def test_a_rewind_takes_away_what_was_still_on_its_way(tmp_path: Path) -> None:
    """Nothing of the steps that never were arrives afterwards."""
    seen, loop = watched(tmp_path / "run", Late(2), every=1000)
    with seen:
        loop.run(12)
        seen.rewind(10)
        loop.run(1)
    assert [step for step, _ in record(tmp_path / "run")[0]] == list(range(1, 12))


def test_a_device_that_fails_does_not_hide_the_error_of_the_training(tmp_path: Path) -> None:
    """What could not be read is said, the steps before are there, and the exception is the training's own."""
    late = Late(2)
    seen, loop = watched(tmp_path / "run", late, every=1000)
    with pytest.raises(ZeroDivisionError):
        loop.crash(seen, 12, late)
    run = Run.open(tmp_path / "run")
    assert [(event["kind"], event["step"]) for event in run.events] == [
        ("warning", 11),
        ("warning", 12),
        ("flight", 12),
    ]
    assert "device-side assert" in run.events[0]["text"]
    assert run.steps["step"].tolist() == list(range(1, 13))
    assert np.isfinite(run.steps["loss"]).tolist() == [True] * 10 + [False] * 2
    assert "ZeroDivisionError" in run.events[-1]["why"]


@pytest.mark.gpu
def test_numbers_of_a_gpu_arrive_behind_the_work_before_them() -> None:
    """Not ready while the device is busy; exact; waiting is possible."""
    for busy in (1, 200_000_000):  # once before: a kernel's first launch may wait
        x = torch.arange(6, device="cuda", dtype=torch.float32).reshape(2, 3)
        torch.cuda._sleep(busy)
        reading = Reading([x, torch.tensor(2.5), x.sum()])
        x.zero_()
    assert not reading.ready()
    assert reading.values() == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [2.5], [15.0]]
    assert reading.ready()


@pytest.mark.gpu
def test_a_watched_step_between_looks_never_waits_for_the_gpu(tmp_path: Path) -> None:
    """torch raises where the host would wait; and all is on record in the end."""
    model = build().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(48, 64, device="cuda").bfloat16()

    def train(steps: int) -> None:
        for _ in range(steps):
            (model(x) - x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with watch(model, tmp_path / "run", every=1000) as seen:
        train(8)
        with never_waits():
            train(7)  # the next look is at 16
    run = Run.open(seen.folder)
    assert run.steps["step"].tolist() == list(range(1, 16))
    assert np.isfinite(run.steps["loss"]).all()
