"""What is measured and kept: with an injected clock, so that no device is needed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ottava.kernels import accumulate, gemm_choice, reference, scaled_mm
from ottava.kernels.gemm_choice import Choice, Store, call_name, measure
from ottava.kernels.triton import gemm as triton_gemm
from ottava.numerics.accumulator import ACCUMULATORS
from ottava.numerics.formats import E4M3
from ottava.numerics.scaling import PER_ROW
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.ops import dispatch, quantize
from ottava.ops import gemm as ops

CHOICE = Choice({"triton_gemm 128x256": 1.5, "scaled_mm": 2.0}, {"broken": "no"})
CALL, DEVICE = "E4M3[tensor] x E4M3[tensor] 4x4x4 bfloat16", "H200, 9.0, torch 2.13"


def operands(rows: int = 32, granularity: object = None) -> tuple[QuantizedTensor, QuantizedTensor]:
    spec = QuantizationSpec(E4M3) if granularity is None else QuantizationSpec(E4M3, PER_ROW)
    return quantize.quantize(torch.randn(rows, 64), spec), quantize.quantize(torch.randn(48, 64), spec)


# --- measuring -------------------------------------------------------------------------------------------------------


def by_way(seconds: dict[str, float], ways: dict[str, Callable[[], Tensor]]) -> gemm_choice.Timer:
    """A clock that knows how long each way takes."""
    known = {id(run): seconds[name] for name, run in ways.items()}
    return lambda run: known[id(run)]


def test_the_fastest_comes_first() -> None:
    ways = {name: (lambda value=value: torch.tensor(value)) for value, name in enumerate("abc")}
    choice = measure(ways, lambda way, y: "", by_way({"a": 3e-3, "b": 1e-3, "c": 2e-3}, ways))
    assert list(choice.milliseconds.items()) == [("b", 1.0), ("c", 2.0), ("a", 3.0)]
    assert choice.failed == {}
    assert str(choice) == "b 1 ms; c 2 ms; a 3 ms"


def test_a_median_is_taken_and_turns_alternate() -> None:
    """One slow sample of nine decides nothing."""
    ways = {name: (lambda: torch.ones(1)) for name in "ab"}
    order: list[str] = []
    names = {id(run): name for name, run in ways.items()}

    def timer(run: Callable[[], Tensor]) -> float:
        order.append(names[id(run)])
        return 100.0 if len(order) == 1 else {"a": 1.0, "b": 2.0}[order[-1]]

    assert list(measure(ways, lambda way, y: "", timer).milliseconds) == ["a", "b"]
    assert order == ["a", "b"] * 9


def test_a_way_that_fails_or_is_wrong_is_none() -> None:
    """However fast it is; its reason is kept."""

    def raises() -> Tensor:
        raise RuntimeError("out of shared memory\nand a long story")

    ways = {"raises": raises, "wrong": lambda: torch.zeros(1), "right": lambda: torch.ones(1)}
    choice = measure(ways, lambda way, y: "" if y.all() else "wrong results", lambda run: 1.0)
    assert list(choice.milliseconds) == ["right"]
    assert choice.failed == {"raises": "RuntimeError: out of shared memory", "wrong": "wrong results"}
    with pytest.raises(RuntimeError, match="no way to run this GEMM works: raises: RuntimeError: out of shared memory"):
        measure({"raises": raises}, lambda way, y: "", lambda run: 1.0)


def test_a_call_is_named_by_all_that_decides_its_time() -> None:
    a, b = operands()
    names = {
        call_name(a, b, torch.bfloat16, None, False),
        call_name(a, b, torch.bfloat16, None, True),
        call_name(a, b, torch.float32, None, False),
        call_name(a, b, torch.bfloat16, torch.ones(48), False),
        call_name(a, b, torch.bfloat16, torch.ones(48).bfloat16(), False),
        call_name(b, a, torch.bfloat16, None, False),
        call_name(*operands(granularity="row"), torch.bfloat16, None, False),
        call_name(*operands(33), torch.bfloat16, None, False),
    }
    assert len(names) == 8
    assert "E4M3[row] x E4M3[row] 32x48x64 bfloat16" in names


# --- the disk --------------------------------------------------------------------------------------------------------


def test_what_is_kept_is_read_by_the_next_process(tmp_path: Path) -> None:
    """And by no other kind of device; a newer measurement takes the place of an older one."""
    first = Store(tmp_path, DEVICE)
    assert (first.known(CALL), len(first)) == (None, 0)
    assert first.keep(CALL, CHOICE) == ""
    assert first.known(CALL) == CHOICE
    again = Store(tmp_path, DEVICE)
    assert again.known(CALL) == CHOICE
    assert list(again.known(CALL).milliseconds) == list(CHOICE.milliseconds)
    assert len(Store(tmp_path, "H100")) == 0
    newer = CHOICE._replace(milliseconds={"scaled_mm": 1.0})
    again.keep(CALL, newer)
    assert Store(tmp_path, DEVICE).known(CALL) == newer
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("1.5", "0.5"),
        lambda text: "",
        lambda text: "[]",
        lambda text: '{"sha256": 3, "body": 4}',
        lambda text: "\0" * len(text),
    ],
    ids=["cut", "changed", "empty", "list", "numbers", "zeros"],
)
def test_a_damaged_file_is_as_good_as_none(damage: Callable[[str], str], tmp_path: Path) -> None:
    """And the next measurement repairs it."""
    Store(tmp_path, DEVICE).keep(CALL, CHOICE)
    (path,) = tmp_path.iterdir()
    path.write_text(damage(path.read_text()))
    damaged = Store(tmp_path, DEVICE)
    assert len(damaged) == 0
    damaged.keep(CALL, CHOICE)
    assert Store(tmp_path, DEVICE).known(CALL) == CHOICE


@pytest.mark.parametrize("times", [{}, {"a": float("nan")}, {"a": "fast"}, [1.0]], ids=str)
def test_a_whole_file_that_makes_no_sense_is_none(times: object, tmp_path: Path) -> None:
    """Written by a program that is not this one."""
    Store(tmp_path, DEVICE).keep(CALL, CHOICE)
    (path,) = tmp_path.iterdir()
    body = json.dumps({"call": CALL, "milliseconds": times, "failed": {}})
    path.write_text(json.dumps({"sha256": gemm_choice._hash(body), "body": body}))
    assert len(Store(tmp_path, DEVICE)) == 0


def test_a_cache_that_cannot_be_written_holds_for_the_process(tmp_path: Path) -> None:
    """A folder that is gone, and none at all; the note says so."""
    gone = Store(tmp_path / "gone", DEVICE)
    assert "cannot be written (No such file or directory): the measurement holds for this process" in gone.keep(
        CALL, CHOICE
    )
    assert gone.known(CALL) == CHOICE
    nowhere = Store(None, DEVICE)
    assert nowhere.keep(CALL, CHOICE).startswith("no cache folder")
    assert nowhere.known(CALL) == CHOICE


def test_the_first_kept_stays_where_that_is_asked_for(tmp_path: Path) -> None:
    """And holds for who came later; a tuning that was asked for replaces it."""
    early, late = Store(tmp_path, DEVICE), Store(tmp_path, DEVICE)
    other = Choice({"scaled_mm": 1.0}, {})
    assert early.keep(CALL, CHOICE, first=True) == late.keep(CALL, other, first=True) == ""
    assert late.known(CALL) == Store(tmp_path, DEVICE).known(CALL) == CHOICE
    assert late.keep(CALL, other) == ""
    assert Store(tmp_path, DEVICE).known(CALL) == other
    assert [late.path(CALL)] == list(tmp_path.iterdir())


# --- the choice ------------------------------------------------------------------------------------------------------


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An accelerator's kernels on this CPU, of which torch's and Triton's take the call, and a store of its own."""
    store = Store(tmp_path, DEVICE)
    monkeypatch.setattr(dispatch, "CPU_KERNELS", (scaled_mm, triton_gemm, reference))
    monkeypatch.setattr(dispatch, "_in_order", lambda kernels, native: kernels)
    monkeypatch.setattr(triton_gemm, "supports_gemm", lambda *_: None)
    monkeypatch.setattr(gemm_choice, "known", lambda a, b, *call: store.known(call_name(a, b, *call)))
    return store


@pytest.mark.scaled_mm_on_cpu
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs where there is no GPU")
def test_what_was_measured_faster_runs(tuned: Store) -> None:
    """Unmeasured torch's comes first; then the fastest; `explain` says why; and the log has no refusals."""
    pytest.importorskip("triton", reason="Triton has no build for this machine")
    from kernels.triton import interpreter as triton_interpreter

    triton_interpreter.install()
    a, b = operands()

    def ran() -> str:
        log: list[ops.GemmRecord] = []
        ops.gemm(a, b, out_dtype=torch.bfloat16, log=log.append)
        assert log[0].refusals == ()
        return log[0].kernel

    assert ran() == "scaled_mm"
    for favourite in ("triton_gemm", "scaled_mm", "triton_gemm"):
        timer = timer_that_favours(favourite)
        choice = ops.tune_gemm(a, b, out_dtype=torch.bfloat16, timer=timer, store=tuned)
        assert len(choice.milliseconds) == 1 + len(triton_gemm.configs(a, b, torch.bfloat16))
        assert choice.failed == {}
        assert ran() == favourite
    lines = ops.explain(a, b, out_dtype=torch.bfloat16).splitlines()
    assert lines == [
        "scaled_mm: supported, but triton_gemm was measured to be the fastest",
        "triton_gemm: runs",
        "reference: supported, but triton_gemm was measured to be the fastest",
        f"measured: {choice}",
    ]


def timer_that_favours(kernel: str) -> gemm_choice.Timer:
    """Microseconds for one kernel, more for the others; the last configuration of Triton's is its fastest."""
    seen: list[object] = []

    def timer(run: Callable[[], Tensor]) -> float:
        if run not in seen:
            seen.append(run)
        own = run.func.__module__.replace("triton.", "triton_").endswith(kernel)
        return (1e-6 if own else 1e-3) / (1 + seen.index(run))

    return timer


def test_the_fastest_configuration_runs(tuned: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the kernel is asked for by name; one that is not offered for the call is passed over."""
    a, b = operands()
    ran: list[triton_gemm.Config] = []
    monkeypatch.setattr(
        triton_gemm, "plan_under", lambda a, b, dtype, bias, config: lambda *operands: ran.append(config)
    )
    usable = triton_gemm.configs(a, b, torch.bfloat16)
    ways = [triton_gemm.way(triton_gemm.CONFIGS[0]), "triton_gemm of old", triton_gemm.way(usable[2]), "scaled_mm"]
    triton_gemm.plan_gemm(a, b, torch.bfloat16, None)(a, b, None)
    tuned.keep(call_name(a, b, torch.bfloat16, None, False), Choice({way: float(i) for i, way in enumerate(ways)}, {}))
    triton_gemm.plan_gemm(a, b, torch.bfloat16, None)(a, b, None)
    assert ran == [usable[0], usable[2]]


@pytest.mark.scaled_mm_on_cpu
def test_biased_operands_judge_every_way(tuned: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right on normal numbers and not on magnitudes: out, unless fast accumulation may lose so much; that is told."""
    a, b = (quantize.quantize(torch.randn(16, 16384), QuantizationSpec(E4M3)) for _ in range(2))

    def short(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, bias: None, config: object) -> Tensor:
        return accumulate.gemm(a, b, dtype, bias, ACCUMULATORS["hopper"])

    def chosen(fast: bool) -> Choice:
        return ops.tune_gemm(
            a, b, out_dtype=torch.bfloat16, fast_accum=fast, timer=timer_that_favours("triton_gemm"), store=tuned
        )

    monkeypatch.setattr(triton_gemm, "run", short)
    accurate, fast = chosen(False), chosen(True)
    assert list(accurate.milliseconds) == ["scaled_mm"]
    assert {why.partition(" error ")[0] for why in accurate.failed.values()} == {
        "wrong results on magnitudes: relative"
    }
    assert not fast.failed
    assert set(fast.biased) == set(fast.milliseconds)
    assert fast.biased["scaled_mm"] < 2.0**-7
    assert fast.kernel == "triton_gemm"
    assert re.search("^triton_gemm [^;]*, 2[23]% off on magnitudes;", str(fast))
    path = tuned.path(call_name(a, b, torch.bfloat16, None, True))
    assert path is not None
    read = gemm_choice._read(path)
    assert read is not None
    assert read[1] == fast
    monkeypatch.setattr(
        triton_gemm, "run", lambda a, b, *_: short(a, b, *_) * (0.5 if a.dequantize().min() >= 0 else 1)
    )
    assert chosen(True).kernel == "scaled_mm"  # loses more than any tensor core


@pytest.mark.scaled_mm_on_cpu
def test_a_measured_kernel_that_no_longer_takes_the_call_is_passed_over(
    tuned: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its reason in the log."""
    a, b = operands()
    made = dispatch.made_of(a.device)
    tuned.keep(call_name(a, b, torch.bfloat16, None, False), Choice({"triton_gemm x": 1.0}, {}, made))
    monkeypatch.setattr(triton_gemm, "supports_gemm", lambda *_: "triton_gemm: not today")
    log: list[ops.GemmRecord] = []
    ops.gemm(a, b, out_dtype=torch.bfloat16, log=log.append)
    assert (log[0].kernel, log[0].refusals) == ("scaled_mm", ("triton_gemm: not today",))


def test_a_choice_is_out_of_date_once_a_kernel_is_changed(tuned: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any file that a kernel says it is made of; the store's files keep what they were made of."""
    a, b = operands()
    call = (a, b, torch.bfloat16, None, False)
    made = dispatch.made_of(a.device)
    assert set(made) == {"scaled_mm", "triton_gemm", "reference"}
    tuned.keep(call_name(*call), Choice({"triton_gemm x": 1.0}, {}, made))
    path = tuned.path(call_name(*call))
    assert path is not None
    assert gemm_choice._read(path) == (call_name(*call), Choice({"triton_gemm x": 1.0}, {}, made))
    assert dispatch.measured(*call) is not None
    for name in triton_gemm.SOURCES:
        others = tuple(source for source in triton_gemm.SOURCES if source != name)
        with monkeypatch.context() as patch:
            patch.setattr(triton_gemm, "SOURCES", others)
            gemm_choice.hash_of_sources.cache_clear()
            assert dispatch.measured(*call) is None
        gemm_choice.hash_of_sources.cache_clear()
    assert dispatch.measured(*call) is not None


def test_times_are_taken_on_a_device() -> None:
    a, b = operands()
    with pytest.raises(ValueError, match="tune_gemm: got operands on cpu; times are taken on cuda: move them there"):
        ops.tune_gemm(a, b, out_dtype=torch.bfloat16)
    assert gemm_choice.known(a, b, torch.bfloat16, None, False) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_measures(tmp_path: Path) -> None:
    """Every way is timed or says why not, and the choice names a kernel that takes the call."""
    a, b = (quantize.quantize(torch.randn(2048, 2048, device="cuda"), QuantizationSpec(E4M3)) for _ in range(2))
    store = Store(tmp_path, gemm_choice.device_name(a.device))
    choice = ops.tune_gemm(a, b, out_dtype=torch.bfloat16, fast_accum=True, store=store)
    assert choice.failed == {}
    assert all(value > 0 for value in choice.milliseconds.values())
    assert "scaled_mm" in choice.milliseconds or torch.cuda.get_device_capability() < (8, 9)
