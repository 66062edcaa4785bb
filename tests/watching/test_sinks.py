"""Sinks: what they show, how many names they use, and that W&B and trackio get what their interfaces take."""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import ottava
import warm
from ottava.interop.event_file import read_scalars
from ottava.measure.statistics import STATISTICS
from ottava.measure.tally import Tally
from ottava.measure.walk import measure
from ottava.record.reader import Table
from ottava.record.schema import SlotKey
from ottava.watching.sinks import (
    AGGREGATED,
    MAX_TAGS,
    PER_TENSOR,
    TOP_K,
    Limited,
    Row,
    SinkError,
    SinkMissingError,
    TerminalSink,
    make_sinks,
    publish,
    ranked,
)


@functools.cache
def a_cast(factor: float, seed: int = 0) -> Tally:
    """128 tokens, one of them `factor` times larger."""
    x = torch.randn(128, 96, generator=torch.Generator().manual_seed(seed))
    x[5] *= factor
    return measure(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3)))


def key(layer: str, tensor: str = "input") -> SlotKey:
    return SlotKey(layer, tensor, "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")


def a_look(step: int = 100, layers: int = 3, bad: int = 1) -> Table:
    """Layer `bad` has a massive token in its input."""
    tallies = {key(f"layers.{i}.fc2", "weight"): a_cast(1.0, i % 4) for i in range(layers)}
    tallies |= {key(f"layers.{i}.fc2"): a_cast(1e5 if i == bad else 1.0, i % 4) for i in range(layers)}
    return Table.of(step, tallies)


class Notebook:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.looks: dict[int, dict[str, float]] = {}
        self.rows: list[Row] = []
        self.histograms: list[tuple[str, int]] = []

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.looks[step] = dict(values)

    def histogram(self, step: int, tag: str, edges: Sequence[float], counts: Sequence[float]) -> None:
        assert len(edges) == len(counts) + 1
        self.histograms.append((tag, int(sum(counts))))

    def worst(self, step: int, rows: Sequence[Row], numbers: Mapping[str, float]) -> None:
        self.rows = list(rows)

    def close(self) -> None: ...


def test_the_worst_tensor_comes_first_with_its_numbers() -> None:
    """Aggregates of each kind of tensor, equal to the column of the table; the massive tokens on top."""
    book, table = Notebook(), a_look()
    publish([book], 100, table, {"loss": 2.5})
    look = book.looks[100]
    inputs = table.where(tensor="input")
    assert look["train/loss"] == 2.5
    assert look["worst/X/row_sqnr_p50_db"] == inputs.metric("row_sqnr_p50_db").min()
    assert look["worst/X/underflow_pct"] == inputs.metric("underflow_pct").max() > 10
    assert look["worst/W/underflow_pct"] < 1
    assert (look["fp8/marked_critical"], look["fp8/marked_warning"]) == (1, 1)
    assert book.rows[0].slot == key("layers.1.fc2")
    assert book.rows[0].marks["underflow_pct"] == 2
    assert look["tensor/layers.1.fc2/X/amax"] == inputs.metric("amax").max()
    assert book.histograms == [("rows/sqnr_db", 6 * 128)]


def test_at_most_400_names_in_a_run_and_known_ones_go_on() -> None:
    """Another worst layer at every look: names stop at the limit, and what was shown once is shown to the end."""
    book = Notebook()
    sink = Limited(book)
    for step in range(40):
        publish([sink], step, a_look(step, layers=40, bad=step), {"loss": 1.0})
    names = [set(look) for look in book.looks.values()]
    assert len(set().union(*names)) == len(sink.tags) == MAX_TAGS
    assert all(before <= after for before, after in itertools.pairwise(names))
    assert sink.dropped > 0
    room = 2 + len(AGGREGATED) * 6 * 2 + 10
    assert room + TOP_K * len(PER_TENSOR) < MAX_TAGS  # the first look always fits
    assert set(AGGREGATED) | set(PER_TENSOR) <= set(STATISTICS)


def test_unknown_numbers_are_not_shown_as_zero() -> None:
    """A light or imported row knows little: no aggregate of it, and no crash."""
    book = Notebook()
    publish([book], 1, Table.of(1, {key("fc1"): Tally(amax=3.0)}), {})
    assert "worst/X/row_sqnr_p50_db" not in book.looks[1]
    assert math.isnan(book.looks[1]["tensor/fc1/X/underflow_pct"])
    publish([book], 2, Table.of(2, {}), {"loss": 1.0})
    assert book.looks[2]["train/loss"] == 1.0
    assert ranked(Table.of(3, {})) == []


# --- terminal -------------------------------------------------------------------------------------------------------


def terminal(*, tty: bool) -> tuple[TerminalSink, io.StringIO]:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=tty, width=120, color_system=None, legacy_windows=False)
    return TerminalSink(Path(), console=console), stream


def test_a_pipe_gets_one_line_a_look() -> None:
    """Step, loss, how many are marked, the worst tensor; no control characters."""
    sink, stream = terminal(tty=False)
    publish([sink], 12300, a_look(), {"loss": 2.413, "grad_norm": 0.61})
    sink.close()
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("step 12,300  loss 2.413  grad_norm 0.61  FP8: 1 critical, 0 warning  worst: layers.1.fc2/X")
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_a_table() -> None:
    """Worst first, marked in words that need no colour."""
    sink, stream = terminal(tty=True)
    publish([sink], 100, a_look(), {"loss": 2.5})
    sink.close()
    text = stream.getvalue()
    assert "row SQNR p50" in text
    lines = [line for line in text.splitlines() if "layers." in line]
    assert lines[0].split()[0] == "layers.1.fc2"
    assert "!!" in lines[0]
    assert "!!" not in lines[1]


# --- TensorBoard, W&B, trackio --------------------------------------------------------------------------------------


def test_tensorboard_files_are_in_the_run_folder(tmp_path: Path) -> None:
    """One tag of each number; no NaN."""
    sinks = make_sinks(["tensorboard"], tmp_path)
    publish(sinks, 100, a_look(), {"loss": 2.5})
    for sink in sinks:
        sink.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    read = {s.tag: s.value for s in read_scalars(path)}
    assert read["train/loss"] == 2.5
    assert read["worst/X/underflow_pct"] > 10
    assert not any(math.isnan(value) for value in read.values())


FAKE_LOGGER = """
import json
calls = []
run = None
class Histogram:
    def __init__(self, np_histogram):
        counts, edges = np_histogram
        assert len(edges) == len(counts) + 1
def init(*, project, name, **settings):
    calls.append(["init", project, name, settings])
def log(values, step=None):
    calls.append(["log", {k: v for k, v in values.items() if isinstance(v, float)} | {"step": step}])
def finish():
    print(json.dumps([*calls, ["finish"]]))
"""
SENDS = """
import sys
from pathlib import Path
sys.path[:0] = [{folder!r}, {tests!r}]
from test_sinks import a_look
from ottava.watching.sinks import make_sinks, publish
sinks = make_sinks([{{name: {{"project": "mine", "tags": ["fp8"]}}}} for name in ("wandb", "trackio")], Path("runs/a"))
publish(sinks, 100, a_look(), {{"loss": 2.5}})
for sink in sinks:
    sink.close()
"""


def test_loggers_get_a_run_of_their_own(tmp_path: Path) -> None:
    """init with the settings, log with the step, finish: a stand-in module in a process of its own records them."""
    for name in ("wandb", "trackio"):
        (tmp_path / f"{name}.py").write_text(FAKE_LOGGER, encoding="utf-8")
    script = SENDS.format(folder=str(tmp_path), tests=str(Path(__file__).parent))
    done = warm.run(["-c", script])
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(records) == 2
    for calls in records:
        assert calls[0] == ["init", "mine", "a", {"tags": ["fp8"]}]
        logged = [values for call, *rest in calls if call == "log" for values in rest]
        assert {values["step"] for values in logged} == {100}
        assert logged[0]["train/loss"] == 2.5
        assert logged[0]["worst/X/underflow_pct"] > 10
        assert calls[-1] == ["finish"]


class _Running:
    """A logger whose run the training script began."""

    run = object()

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def log(self, values: dict[str, Any]) -> None:
        self.lines.append(values)


def test_a_run_that_is_there_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No second init, no finish, and no step that could go backwards."""
    module = _Running()
    monkeypatch.setitem(sys.modules, "wandb", module)  # type: ignore[arg-type]
    sinks = make_sinks(["wandb"], tmp_path)
    publish(sinks, 100, a_look(), {"loss": 2.5})
    for sink in sinks:
        sink.close()
    assert all(line["watch/step"] == 100 for line in module.lines)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_missing_package_names_the_extra(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 3, and what to install."""
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SinkMissingError, match=rf"ottava\[{name}\]") as caught:
        make_sinks([name], tmp_path)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    "entry, words",
    [
        ("tensorbord", "did you mean 'tensorboard'"),
        ({"terminal": {"topk": 3}}, "sink terminal: .*topk"),
        ({"terminal": {}, "wandb": {}}, "unknown sink"),
        (5, "unknown sink"),
    ],
)
def test_unknown_sinks_and_settings_are_refused(tmp_path: Path, entry: Any, words: str) -> None:
    """With the nearest known name."""
    with pytest.raises(SinkError, match=words):
        make_sinks([entry], tmp_path)
