"""The order of ways on a CPU: measured once, kept, the same for all processes; injected clocks, and a real one once."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ottava.kernels import gemm_choice, reference
from ottava.kernels.gemm_choice import SIZES, Store, Way, operands, rank
from ottava.numerics.tensor import QuantizedTensor

DEVICE = "a CPU, torch 2.13, a key"


def right(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
    return reference.gemm(a, b, torch.bfloat16, None)


def ways(*names: str) -> dict[str, Way]:
    return dict.fromkeys(names, right)


def clock(*seconds: float) -> Callable[[Callable[[], Tensor]], float]:
    """Takes turns: a round of ways, again and again."""
    times = [*seconds] * 9
    return lambda run: times.pop(0)


# --- the order -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "times, order",
    [
        ((1.0, 1.0, 1.0), "abc"),
        ((1.09, 1.0, 5.0), "abc"),  # not clearly beaten
        ((1.2, 1.0, 5.0), "bac"),
        ((3.0, 2.9, 1.0), "cab"),
        ((1.2, 1.15, 1.1), "abc"),  # a within a tenth of c
        ((5.0, 1.2, 1.0), "cba"),
    ],
)
def test_capability_decides_unless_clearly_beaten(times: tuple[float, ...], order: str, tmp_path: Path) -> None:
    """A tenth is the margin."""
    ranking = rank("x", ways("a", "b", "c"), "", store=Store(tmp_path, DEVICE), timer=clock(*times))
    assert "".join(ranking.order) == order


# --- what is measured ------------------------------------------------------------------------------------------------


def test_wrong_bits_are_no_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One number of 131,072, off by an ulp, however fast; and where no way is right, capability decides and says so."""

    def wrong(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
        y = right(a, b)
        y[100, 200] = torch.nextafter(y[100, 200], torch.tensor(1e30, dtype=y.dtype))
        return y

    def broken(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
        raise RuntimeError("no tiles")

    store = Store(tmp_path, DEVICE)
    both = {"wrong": wrong, "broken": broken}
    ranking = rank("x", {**both, "right": right}, "", store=store, timer=clock(1.0))
    assert ranking.order == ("right", "wrong", "broken")
    assert ranking.choice is not None
    assert ranking.choice.failed == {"wrong": "1 of 131072 numbers are wrong", "broken": "RuntimeError: no tiles"}
    with caplog.at_level(logging.WARNING, "ottava"):
        ranking = rank("y", both, "", store=store, timer=clock(1.0))
    assert ranking.order == ("wrong", "broken")
    assert "nothing could be measured (RuntimeError: no way to run this GEMM works" in ranking.note
    assert ranking.note in caplog.text
    assert str(ranking) == ranking.note


def test_sums_of_the_operands_are_exact_in_any_order() -> None:
    """Integers up to 8, all of them; so one wrong bit is a wrong way."""
    a, b = operands(*SIZES)
    numbers = a.data.float(), b.data.float()
    assert all(set(x.unique().tolist()) == set(range(-8, 9)) for x in numbers)
    exact = numbers[0].double() @ numbers[1].double().t()
    assert float((numbers[0].abs() @ numbers[1].abs().t()).max()) < 2**24
    assert exact.unique().numel() > 1000
    assert torch.equal(right(a, b), exact.to(torch.bfloat16))


def test_measuring_is_not_seen_from_outside(tmp_path: Path) -> None:
    """Neither modes, autocast, default dtype and threads of the caller reach it, nor does it change any of them."""
    seen: list[object] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def spy(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
        inside.append((torch.get_num_threads(), torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()))
        return right(a, b)

    inside: list[tuple[int, bool, bool]] = []
    state = torch.get_rng_state()
    torch.set_num_threads(3)
    with Mode(), torch.autocast("cpu"), torch.inference_mode(), torch.device("meta"):
        rank("x", {"a": spy, "b": spy}, "", store=Store(tmp_path, DEVICE), timer=clock(1.0, 2.0))
    with ThreadPoolExecutor(1) as fresh:  # a thread begins with the number that was set last, by whomever
        assert fresh.submit(torch.get_num_threads).result() == torch.get_num_threads() == 3
    assert seen == []
    assert set(inside) == {(1, False, False)}
    assert torch.equal(torch.get_rng_state(), state)


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_it_is_measured_once_a_machine(tmp_path: Path) -> None:
    """The next process reads; the clock would say otherwise. Other names, or another key, and it is measured anew."""
    first = rank("x", ways("a", "b"), "", store=Store(tmp_path, DEVICE), timer=clock(2.0, 1.0))
    again = rank("x", ways("a", "b"), "", store=Store(tmp_path, DEVICE), timer=clock(1.0, 2.0))
    assert first.order == again.order == ("b", "a")
    assert again.path is not None
    assert str(again).startswith("b 1000 ms; a 2000 ms (256 x 512 x 512, one thread, once a machine; delete ")
    for names, device in ((("a", "c"), DEVICE), (("a", "b"), f"{DEVICE}s")):
        other = rank("x", ways(*names), "", store=Store(tmp_path, device), timer=clock(1.0, 2.0))
        assert other.order == names
    again.path.unlink()
    assert rank("x", ways("a", "b"), "", store=Store(tmp_path, DEVICE), timer=clock(1.0, 2.0)).order == ("a", "b")


def test_the_first_to_come_decides(tmp_path: Path) -> None:
    """Of two processes that both found nothing, the later goes by the earlier, not by its own clock."""
    early, late = Store(tmp_path, DEVICE), Store(tmp_path, DEVICE)
    rank("x", ways("a", "b"), "", store=early, timer=clock(2.0, 1.0))
    assert rank("x", ways("a", "b"), "", store=late, timer=clock(1.0, 2.0)).order == ("b", "a")
    assert len(list(tmp_path.iterdir())) == 1


def test_a_damaged_file_is_replaced(tmp_path: Path) -> None:
    """And holds for the next process again."""
    ranking = rank("x", ways("a", "b"), "", store=Store(tmp_path, DEVICE), timer=clock(2.0, 1.0))
    assert ranking.path is not None
    ranking.path.write_text(ranking.path.read_text().replace('"a', '"c'))
    for timer in (clock(1.0, 2.0), clock()):
        assert rank("x", ways("a", "b"), "", store=Store(tmp_path, DEVICE), timer=timer).order == ("a", "b")
    assert len(list(tmp_path.iterdir())) == 1


def test_without_links_the_last_to_come_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems have none."""

    def link(*_: object) -> None:
        raise OSError("no links")

    monkeypatch.setattr(os, "link", link)
    rank("x", ways("a", "b"), "", store=Store(tmp_path, DEVICE), timer=clock(2.0, 1.0))
    assert rank("x", ways("a", "b"), "", store=Store(tmp_path, DEVICE), timer=clock()).order == ("b", "a")


def test_without_a_cache_it_holds_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured, and said."""
    ranking = rank("x", ways("a", "b"), "", store=Store(None, DEVICE), timer=clock(2.0, 1.0))
    assert ranking.order == ("b", "a")
    assert ranking.path is None
    assert str(ranking).endswith("no cache folder: the measurement holds for this process; set OTTAVA_CACHE)")


def test_racing_stores_agree(tmp_path: Path) -> None:
    """Four measure at once, each with a clock and a Store of its own, as processes have: the first file holds for all.

    In threads: a fork of a process that has run on several threads may inherit a lock that nobody will open.
    """
    together = threading.Barrier(4, timeout=300)

    def race(number: int) -> tuple[str, ...]:
        store = Store(tmp_path, DEVICE)
        times = (2.0, 1.0) if number % 2 else (1.0, 2.0)
        together.wait()
        return rank("x", ways("a", "b"), "", store=store, timer=clock(*times)).order

    with ThreadPoolExecutor(4) as racers:
        orders = set(racers.map(race, range(4)))
    assert len(orders) == 1
    assert rank("x", ways("a", "b"), "", store=Store(tmp_path, DEVICE), timer=clock()).order in orders
    assert len(list(tmp_path.glob("*gemm-*"))) == 1


def test_a_real_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the work takes longer; kept in the cache folder, under the CPU's name."""

    def twice(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
        right(a, b)
        right(a, b)
        return right(a, b)

    monkeypatch.setenv("OTTAVA_CACHE", str(tmp_path / "cache"))
    ranking = rank("real", {"thrice": twice, "once": right}, "a key")
    assert ranking.order == ("once", "thrice")
    assert ranking.path is not None
    assert ranking.path.parent == tmp_path / "cache"
    assert torch.__version__ in ranking.path.read_text()
    assert gemm_choice.rank("real", {"thrice": twice, "once": right}, "a key", timer=clock()).order == ranking.order
