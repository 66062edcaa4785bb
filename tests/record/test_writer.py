"""Writing survives kill -9, torn lines and resumptions. What comes back: test_reader.py."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import ottava
import warm
from ottava.measure.tally import DETAILS, Detail, Tallies, Tally, tally_fields
from ottava.measure.walk import measure, measure_packed
from ottava.record.reader import Run
from ottava.record.schema import EVENTS, MANIFEST, STATS, STEPS, RunError, SlotKey
from ottava.record.writer import RunWriter

KEY = SlotKey("layers.0.mlp.fc2", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")


def real_tally(seed: int = 0) -> Tally:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(seed))
    return measure(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3)))


def rows_of(path: Path) -> list[int]:
    return Run.open(path).table()["step"].tolist()


# --- kill -9 --------------------------------------------------------------------------------------------------------

WRITES_FOREVER = """
import itertools, sys
from pathlib import Path
from tests_key import KEY
from ottava.record.writer import RunWriter
from ottava.measure.tally import DETAILS, Detail, Tallies, Tally, tally_fields
writer = RunWriter(Path(sys.argv[1]), flush_rows=8)
for step in itertools.count():
    writer.step(step, loss=1.0 / (step + 1))
    writer.event(step, "trigger", reason="clipping", value=0.5, threshold=1e-5)
    writer.tally(step, KEY, Tally(n=step + 1, n_nonzero=step + 1, amax=2.0))
    if step in (40, 200):
        print(step, flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
@pytest.mark.parametrize("after", [40, 200])
def test_kill_9_loses_at_most_what_was_not_flushed(tmp_path: Path, after: int) -> None:
    """Every line of steps and events, and all rows of statistics but the last seven; and it can be gone on with."""
    (tmp_path / "tests_key.py").write_text(
        f"from ottava.record.schema import SlotKey\nKEY = SlotKey(*{tuple(KEY)!r})\n", encoding="utf-8"
    )
    path = tmp_path / "run"
    process = warm.Warm(["-c", WRITES_FOREVER, str(path)], cwd=tmp_path)
    process.wait_for(f"{after}\n")
    process.send_signal(signal.SIGKILL)
    process.wait()
    run = Run.open(path)
    done = len(run.steps["step"])
    assert done >= after
    assert run.steps["step"].tolist() == list(range(done))
    assert done - 1 <= len(run.events) <= done
    steps = run.table()["step"].tolist()
    assert steps == list(range(len(steps)))
    assert done - 8 <= len(steps) <= done
    with RunWriter(path, append=True) as writer:
        writer.step(done, loss=0.5)
        writer.tally(done, KEY, Tally(n=1))
    again = Run.open(path)
    assert again.steps["step"][-1] == done
    assert again.table()["step"].tolist() == [*steps, done]


def test_a_torn_line_takes_no_other_with_it(tmp_path: Path) -> None:
    """The next writer begins a line of its own."""
    with RunWriter(tmp_path / "run") as writer:
        writer.step(1, loss=3.0)
        writer.event(1, "warning", text="a")
    for name in (STEPS, EVENTS):
        with (tmp_path / "run" / name).open("ab") as stream:
            stream.write(b'{"step": 2, "lo')
    assert Run.open(tmp_path / "run").steps["step"].tolist() == [1]
    with RunWriter(tmp_path / "run", append=True) as writer:
        writer.step(2, loss=2.0)
        writer.event(2, "resumed")
    run = Run.open(tmp_path / "run")
    assert run.steps["loss"].tolist() == [3.0, 2.0]
    assert [event["kind"] for event in run.events] == ["warning", "resumed"]


def test_nothing_half_written_is_under_its_name(tmp_path: Path) -> None:
    """Parts and the manifest are renamed into place; no scratch file stays."""
    with RunWriter(tmp_path / "run", flush_rows=2) as writer:
        for step in range(5):
            writer.tally(step, KEY, real_tally(step))
    files = sorted(p.name for p in (tmp_path / "run" / STATS).iterdir())
    assert files == [f"part-0-{i:06d}.parquet" for i in range(3)]
    assert not list((tmp_path / "run").glob("*.tmp"))


# --- resumption -----------------------------------------------------------------------------------------------------


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    """Unless it is gone on with."""
    RunWriter(tmp_path / "run").close()
    with pytest.raises(RunError, match=r"already has a watched run.*append=True"):
        RunWriter(tmp_path / "run")
    RunWriter(tmp_path / "run", append=True).close()


def test_a_run_is_not_gone_on_with_behind_a_torn_part(tmp_path: Path) -> None:
    """Its rows could not come back; whoever moves it away goes on without them."""
    with RunWriter(tmp_path / "run", flush_rows=1) as writer:
        for step in range(3):
            writer.tally(step, KEY, real_tally())
    part = tmp_path / "run" / "stats" / "part-0-000001.parquet"
    part.write_bytes(part.read_bytes()[:-40])
    with pytest.raises(RunError, match=r"part-0-000001.parquet is torn, so its rows are missing; move it away"):
        RunWriter(tmp_path / "run", append=True, step=1)
    part.unlink()
    RunWriter(tmp_path / "run", append=True, step=1).close()
    assert rows_of(tmp_path / "run") == [0]


def test_going_on_keeps_what_is_there(tmp_path: Path) -> None:
    """Manifest, rows and lines; also where an early part is gone."""
    with RunWriter(tmp_path / "run", flush_rows=1) as writer:
        writer.describe(config={"lr": 1e-3})
        for step in range(3):
            writer.tally(step, KEY, real_tally())
    (tmp_path / "run" / STATS / "part-0-000000.parquet").unlink()
    with RunWriter(tmp_path / "run", append=True, flush_rows=1) as writer:
        writer.describe(command=["train.py"])
        writer.tally(3, KEY, real_tally())
    assert rows_of(tmp_path / "run") == [1, 2, 3]
    manifest = Run.open(tmp_path / "run").manifest
    assert (manifest["config"], manifest["command"]) == ({"lr": 1e-3}, ["train.py"])


def test_a_resumption_at_an_earlier_step_cuts_back(tmp_path: Path) -> None:
    """What came after the checkpoint is done again: its lines and rows go."""
    with RunWriter(tmp_path / "run", flush_rows=2) as writer:
        for step in range(1, 6):
            writer.step(step, loss=float(step))
            writer.tally(step, KEY, real_tally())
    with RunWriter(tmp_path / "run", append=True, step=3) as writer:
        writer.step(4, loss=40.0)
        writer.tally(5, KEY, real_tally())
    run = Run.open(tmp_path / "run")
    assert run.steps["loss"].tolist() == [1, 2, 3, 40]
    assert run.table()["step"].tolist() == [1, 2, 3, 5]


def test_another_schema_is_not_appended_to(tmp_path: Path) -> None:
    """Half a run in one version and half in another can be read by nobody."""
    RunWriter(tmp_path / "run").close()
    (tmp_path / "run" / MANIFEST).write_text(json.dumps({"schema_version": 99}), encoding="utf-8")
    with pytest.raises(RunError, match="schema version 99"):
        RunWriter(tmp_path / "run", append=True)


# --- what is stored -------------------------------------------------------------------------------------------------


def test_a_tally_comes_back_as_it_was(tmp_path: Path) -> None:
    """Every field: numbers to the bit, histograms of counts too; energies, kept in fp32, to 2**-24."""
    tally = real_tally()
    with RunWriter(tmp_path / "run") as writer:
        writer.tally(1, KEY, tally)
    back = Run.open(tmp_path / "run").table().tally(0)
    for name, value in vars(tally).items():
        if name.startswith("energy"):
            assert np.allclose(getattr(back, name), value, rtol=2.0**-23, atol=0), name
        else:
            assert np.array_equal(getattr(back, name), value), name


def test_looks_that_wait_are_written_as_their_rows(tmp_path: Path) -> None:
    """In their order, with rows between them; empty ones leave none."""
    keys = [KEY._replace(layer=f"fc{i}") for i in range(3)]
    looks = [Tallies.of({key: real_tally(10 * step + i) for i, key in enumerate(keys)}) for step in range(3)]
    looks[1] = Tallies.of({keys[0]: Tally(amax=1.0)})  # of no element: without histograms
    with RunWriter(tmp_path / "looks") as writer, RunWriter(tmp_path / "rows") as other:
        for step, look in enumerate([*looks, Tallies.of({})]):
            writer.tallies(step, look)
            for key, tally in look.items():
                other.tally(step, key, tally)
            if step == 1:
                for each in (writer, other):
                    each.tally(step, keys[2], Tally(amax=3.0), phase="light")
    ours, truth = (pq.read_table(tmp_path / name / STATS) for name in ("looks", "rows"))
    assert ours.column("layer").to_pylist() == truth.column("layer").to_pylist()
    assert ours.to_pylist() == truth.to_pylist()


@pytest.mark.parametrize("detail", DETAILS)
@pytest.mark.parametrize("together", [False, True])
def test_histograms_that_nobody_counted_are_not_there(tmp_path: Path, detail: Detail, together: bool) -> None:
    """Those that were come back, of every detail, and the others are known to be missing; not one is made of zeros."""
    x = torch.randn(130, 200)
    tally = measure_packed(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3)), detail=detail).tally()
    with RunWriter(tmp_path / "run") as writer:
        if together:
            writer.tallies(1, Tallies.of({KEY: tally}))
        else:
            writer.tally(1, KEY, tally)
    table = Run.open(tmp_path / "run").table()
    known = DETAILS[: DETAILS.index(detail) + 1]
    for f in tally_fields("histogram"):
        recorded = f.metadata["detail"] in known
        assert table.has_histograms(f.name).tolist() == [recorded], f.name
        assert np.allclose(getattr(table.tally(0), f.name), getattr(tally, f.name), rtol=2.0**-23, atol=0), f.name
    (stored,) = pq.read_table(tmp_path / "run" / STATS).to_pylist()
    absent = {f.name for f in tally_fields("histogram") if stored[f.name] is None}
    assert absent == {f.name for f in tally_fields("histogram") if f.metadata["detail"] not in known}
    assert np.isfinite(table.metric("row_sqnr_p50_db")).all()
    assert bool(table.not_recorded()) == (detail == "numbers")


def test_light_rows_have_numbers_only(tmp_path: Path) -> None:
    """Steps between looks: amax and scale; a statistic that needs more is NaN, not 0."""
    with RunWriter(tmp_path / "run") as writer:
        writer.tally(1, KEY, Tally(amax=3.0, scale_max=128.0, scale_min=128.0), phase="light")
        writer.tally(1, KEY, real_tally())
    run = Run.open(tmp_path / "run")
    light = run.table(phase="light")
    assert light.metric("amax").tolist() == [3.0]
    assert np.isnan(light.metric("underflow_pct")).all()
    assert np.isnan(light.metric("row_sqnr_p50_db")).all()
    assert len(run.table()) == 1
    assert len(run.table(phase=None)) == 2


def test_numbers_that_json_does_not_know_survive(tmp_path: Path) -> None:
    """A diverging run's loss is NaN; lines stay valid JSON."""
    with RunWriter(tmp_path / "run") as writer:
        writer.step(1, loss=float("nan"), grad_norm=float("inf"), lr=None, tokens=7)
        writer.event(1, "trigger", value=float("-inf"), list=[np.float64(2.5)], path=tmp_path)
    line = (tmp_path / "run" / STEPS).read_text(encoding="utf-8")
    assert json.loads(line, parse_constant=pytest.fail) == {"step": 1, "loss": "nan", "grad_norm": "inf", "tokens": 7}
    run = Run.open(tmp_path / "run")
    assert np.isnan(run.steps["loss"][0])
    assert np.isinf(run.steps["grad_norm"][0])
    assert run.events[0]["list"] == [2.5]


def test_only_rank_0_writes_steps_and_the_manifest(tmp_path: Path) -> None:
    """Events of every rank are kept, with its number."""
    for rank in (0, 1):
        with RunWriter(tmp_path / "run", rank=rank) as writer:
            writer.describe(rank_was=rank)
            writer.step(1, loss=float(rank))
            writer.event(1, "warning", text="x")
    run = Run.open(tmp_path / "run")
    assert run.manifest["rank_was"] == 0
    assert run.steps["loss"].tolist() == [0.0]
    assert [event["rank"] for event in run.events] == [0, 1]


def test_many_small_parts_become_few(tmp_path: Path) -> None:
    """A flush a look, for 70 looks: a handful of files, and every row is there, once, in order."""
    with RunWriter(tmp_path / "run") as writer:
        for step in range(1, 71):
            writer.tally(step, KEY, Tally(n=step, n_nonzero=step, amax=float(step)))
            writer.flush()
    assert len(list((tmp_path / "run" / "stats").iterdir())) < 20
    table = Run.open(tmp_path / "run").table()
    assert table["step"].tolist() == list(range(1, 71))
    assert table.metric("amax").tolist() == [float(step) for step in range(1, 71)]
