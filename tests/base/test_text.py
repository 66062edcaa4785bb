"""Numbers keep three digits and their unit; names keep both ends; JSON stays JSON."""

import io
import itertools
import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ottava.base.text import duration, elide, listed, number, progress, rounded_alike, signed, to_json
from ottava.interop.contents import read_entries
from ottava.interop.importers import import_run
from ottava.prove.order import of_sum, reveal
from ottava.record.reader import Run
from ottava.report.page import payload


@pytest.mark.parametrize("exponent", range(-30, 31))
def test_number_keeps_three_digits(exponent: int) -> None:
    """What is shown reads back as the number within half a unit of the third digit."""
    for mantissa in (1.0, 1.004, 1.2345, 4.996, 9.99, 9.9951):
        for value in (mantissa * 10.0**exponent, -mantissa * 10.0**exponent):
            shown = float(number(value).replace("−", "-").replace(",", ""))
            assert shown == pytest.approx(value, rel=5.1e-3)
            assert len(number(value)) <= 10


def test_halves_are_rounded_away_from_zero_and_from_the_exact_value() -> None:
    """As Number.toPrecision does; Python's format rounds them to even. 0.1115 and 0.1125 lie above
    their halves in binary, and 9.995 below."""
    values = [1.125, 1.135, 112.5, 113.5, 0.1115, 0.1125, 0.1145, 9.995, 999.5, 9995000.0, 1 + 2**-40]
    shown = [1.13, 1.14, 113.0, 114.0, 0.112, 0.113, 0.115, 9.99, 1000.0, 1e7, 1.0]
    assert [rounded_alike(v) for v in values] == shown
    assert [rounded_alike(-v) for v in values] == [-v for v in shown]


def test_number_says_what_is_not_known_and_not_finite() -> None:
    assert [number(v, "dB") for v in (None, math.nan, math.inf, -math.inf)] == ["–", "–", "∞ dB", "−∞ dB"]


def test_counts_are_exact() -> None:
    assert number(1234567.0, "elements") == "1,234,567"


def test_elided_names_keep_their_ends_and_width() -> None:
    name = "model.decoder.layers.17.mlp.experts.3.down_proj"
    for width in range(5, 60):
        short = elide(name, width)
        assert len(short) == min(width, len(name))
        assert short[:2] == name[:2]
        assert short[-2:] == name[-2:]


def test_listed_counts_what_it_leaves_out() -> None:
    assert listed("abcdefg", most=3) == "a, b, c and 4 more"
    assert listed("ab", most=2) == "a and b"
    assert listed("a") == "a"


def test_signed_and_duration_read_like_a_person_writes() -> None:
    minus = "\N{MINUS SIGN}"
    assert [signed(v) for v in (0.0031, -0.0031, 0.0004, -0.0004)] == ["+0.003", f"{minus}0.003", "0.000", "0.000"]
    assert [duration(s) for s in (0, 59, 59.4, 185, 7800)] == ["0 s", "59 s", "59.4 s", "3 min 05 s", "2 h 10 min"]


def test_json_has_null_for_what_is_not_finite_at_any_depth() -> None:
    values = {"a": [1.5, math.nan, {"b": (math.inf, -math.inf, 2)}], "c": True, "d": "NaN"}
    told = json.loads(to_json(values), parse_constant=lambda word: pytest.fail(word))
    assert told == {"a": [1.5, None, {"b": [None, None, 2]}], "c": True, "d": "NaN"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_for_terminals_and_for_long_work_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten items of half a second: from the second on the rest is told, and at the end nothing is left of it."""
    clock = itertools.count(0.0, 0.5)
    monkeypatch.setattr("ottava.base.text.time.monotonic", lambda: next(clock))
    for stream, told in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr("sys.stderr", stream)
        assert list(progress(range(10), "casting")) == [*range(10)]
        lines = [line.strip() for line in stream.getvalue().split("\r")]
        assert lines == (
            ["", *(f"casting: {i} of 10, {(10 - i) / 2:.0f} s left" for i in range(3, 11)), "", ""] if told else [""]
        )
    monkeypatch.setattr("sys.stderr", stream := Terminal())
    assert list(progress(iter("ab"), "fast")) == ["a", "b"]
    assert stream.getvalue() == ""
    taken = progress((one for one in range(5)), "measuring", prints=True)
    assert [next(taken) for _ in range(4)] == [0, 1, 2, 3]
    assert re.search(r"\rmeasuring: 3 done\r {17}\r$", stream.getvalue())  # a caller may print now
    taken.close()


def test_long_commands_tell_a_terminal_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """order, inspect, import and the page of a report, on a clock by which each step takes two seconds."""
    log = tmp_path / "te" / "nvdlfw_inspect_statistics_logs"
    log.mkdir(parents=True)
    for rank in (0, 1):
        (log / f"nvdlfw_inspect_globalrank-{rank}.log").write_text(
            "INFO - layers.0.fc1_activation_std iteration=000001 value=2.0\n"
        )
    for name in "ab":
        save_file({name: torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    clock = itertools.count(0, 2)
    monkeypatch.setattr("ottava.base.text.time.monotonic", lambda: next(clock))
    for act, doing in (
        (lambda: reveal(of_sum(lambda terms: terms.sum(-1), 8)), "asking for the order of sums"),
        (lambda: list(read_entries(tmp_path)), "reading files"),
        (lambda: import_run(tmp_path / "te", tmp_path / "run", recipe="tensorwise"), "reading files"),
        (lambda: payload(Run.open(tmp_path / "run").table(phase=None)), "making the page"),
    ):
        monkeypatch.setattr("sys.stderr", stream := Terminal())
        act()
        assert re.search(rf"{doing}: \d+ of \d+, .* left", stream.getvalue()), doing
