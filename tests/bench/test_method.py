"""The method of the GPU suites: what is timed, what is compared, what ends a run."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

from ottava.bench import method
from ottava.bench.method import Run, WrongResultError, check, interleaved, race, rotating, seconds, step

CPU = Run(torch.device("cpu"), smoke=False, rounds=3)


def test_wrong_results_have_no_times() -> None:
    """The run checks correctness; NaN is not below any tolerance."""
    right = torch.randn(8, 8)
    assert check("same", right, right, 1e-6) == 0.0
    for wrong in (right * 1.1, right * float("nan")):
        with pytest.raises(WrongResultError, match=r"scaled: relative error .* so its times mean nothing"):
            check("scaled", wrong, right, 0.05)
    assert WrongResultError.exit_code == 1


def test_contenders_take_turns_after_warming_up() -> None:
    """Ten rounds before the counted ones; one in a smoke run."""
    ran: list[str] = []
    times = race(CPU, {"a": lambda: ran.append("a"), "b": lambda: ran.append("b")})
    assert ran == ["a", "b"] * 13
    assert all(0 < one["p10"] <= one["median"] <= one["p90"] for one in times.values())


def test_no_sample_waits_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as long again as the host takes to issue the work, the device pauses before the first event."""
    order: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("event")

        def synchronize(self) -> None:
            order.append("wait")

        def elapsed_time(self, other: Event) -> float:
            return 2.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append(cycles))
    run = Run(torch.device("cuda"), smoke=False, rounds=3)
    assert seconds(run, lambda: order.append("work"), 1e-3) == 2e-3
    assert order == [3_000_000, "event", "work", "event", "wait"]
    seconds(run, lambda: None, 100.0)
    assert order[5] == 60_000_000  # 30 ms: one that waits for the device itself is not waited for in turn


def test_one_that_fails_drops_out_of_a_race() -> None:
    """In the warm-up or later; its error takes the place of its times."""
    left = {"early": 1, "late": 12}

    def fail(name: str) -> None:
        left[name] -= 1
        if left[name] == 0:
            raise RuntimeError(f"{name} is out of memory")

    times = race(CPU, {"early": lambda: fail("early"), "good": lambda: None, "late": lambda: fail("late")})
    assert left == {"early": 0, "late": 0}
    assert times["early"] == {"error": "RuntimeError: early is out of memory"}
    assert times["late"] == {"error": "RuntimeError: late is out of memory"}
    assert times["good"]["median"] > 0


def test_buffers_rotate_beyond_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as fill it, at least two, at most 64, and then the first again."""
    monkeypatch.setattr(method, "L2_BYTES", 1000)
    for nbytes, count in ((400, 3), (5000, 2), (1, 64)):
        made: list[object] = []
        take = rotating(CPU, lambda made=made: made.append(object()) or made[-1], nbytes)
        turns = [take() for _ in range(count + 1)]
        assert len(made) == count
        assert turns == [*made, made[0]]


def test_a_step_makes_its_gradients_anew() -> None:
    """They do not add up from call to call."""
    layer, x = nn.Linear(4, 2), torch.randn(3, 4, requires_grad=True)
    work = step(layer, layer, x, torch.ones(3, 2))
    work()
    assert layer.weight.grad is not None
    assert x.grad is not None
    first = layer.weight.grad.clone(), x.grad.clone()
    work()
    assert torch.equal(layer.weight.grad, first[0])
    assert torch.equal(x.grad, first[1])


def test_ratios_are_within_a_round() -> None:
    """A machine that slows down by ten from round to round: b takes twice a's time in each, and the ratio is 2."""
    now = 0.0
    step = itertools.count()

    def spend(cost: float) -> None:
        nonlocal now
        now += cost * 10.0 ** (next(step) // 2)

    a, b = interleaved({"a": lambda: spend(1), "b": lambda: spend(2)}, 4, clock=lambda: now)
    assert (a.ratio, a.quartiles, b.ratio, b.quartiles) == (1.0, (1.0, 1.0), 2.0, (2.0, 2.0))
    assert a.milliseconds == pytest.approx(1e3 * (1e3 + 1e4) / 2)
    assert asdict(b) == {"name": "b", "milliseconds": b.milliseconds, "ratio": 2.0, "quartiles": (2.0, 2.0)}
