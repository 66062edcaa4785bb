"""Reading a run folder: tables, metrics, ranks, damage, and how long it takes."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ottava
from ottava.measure.statistics import STATISTICS
from ottava.measure.tally import Tally, tally_fields
from ottava.measure.walk import BAND_ROWS, measure
from ottava.record.reader import Run, Table
from ottava.record.schema import MANIFEST, STATS, STEPS, Part, RunError, SlotKey
from ottava.record.writer import RunWriter

SPEC = ottava.QuantizationSpec(ottava.E4M3, ottava.Granularity.parse("1x128"))


def key(layer: str = "layers.0.mlp.fc2", tensor: str = "input") -> SlotKey:
    return SlotKey(layer, tensor, "row", "blockwise", "E4M3", "1x128", "fp32", "current", "door")


def a_tensor(seed: int, rows: int = 2 * BAND_ROWS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 130, generator=generator) * torch.exp2(4 * torch.randn(rows, 1, generator=generator))


def tally_of(x: torch.Tensor) -> Tally:
    return measure(x, ottava.quantize(x, SPEC))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two layers, three looks, two tensors."""
    path = tmp_path_factory.mktemp("reader") / "run"
    with RunWriter(path, flush_rows=5) as writer:
        for step in (100, 200, 300):
            writer.step(step, loss=300.0 / step)
            for layer in ("layers.0.mlp.fc2", "layers.1.mlp.fc2"):
                for tensor in ("input", "weight"):
                    writer.tally(step, key(layer, tensor), tally_of(a_tensor(step + len(tensor))))
    return Run.open(path)


def test_metrics_of_a_table_are_those_of_its_rows(run: Run) -> None:
    """Every statistic: a column of the table equals the number of each row."""
    table = run.table()
    assert len(table) == 12
    for name, statistic in STATISTICS.items():
        column = table.metric(name)
        single = [statistic.finish(table.tally(i)) for i in range(len(table))]
        assert np.allclose(column, single, rtol=1e-12, atol=0, equal_nan=True), name


def test_histograms_that_are_read_late_are_those_of_the_parts_that_were_there(tmp_path: Path) -> None:
    """A running watch merges its parts and deletes them between two readings."""
    with RunWriter(tmp_path / "run") as writer:
        writer.tally(1, key(), tally := tally_of(a_tensor(3)))
    table = Run.open(tmp_path / "run").table()
    for part in (tmp_path / "run" / STATS).iterdir():
        part.unlink()
    assert table.tally(0) == tally


def test_two_threads_never_read_one_part_at_once(tmp_path: Path) -> None:
    """A live page is made while the run is read on; two readings of one Parquet file at once end the process."""
    with RunWriter(tmp_path / "run") as writer:
        writer.tally(1, key(), tally_of(a_tensor(3)))
    part = Part(next((tmp_path / "run" / STATS).iterdir()))
    inside: list[int] = []
    most: list[int] = []
    read = part._file.read

    def slowly(columns: Any) -> Any:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.05)
        inside.pop()
        return read(columns=columns)

    part._file = SimpleNamespace(read=slowly)
    with ThreadPoolExecutor(4) as threads:
        tables = [*threads.map(part.read, [("step",)] * 4)]
    assert (max(most), len(most), [len(table) for table in tables]) == (1, 4, [1] * 4)


def test_choosing_rows(run: Run) -> None:
    """One value, several values, several columns; and what was chosen keeps its own numbers."""
    table = run.table()
    some = table.where(tensor=("weight",), layer="layers.1.mlp.fc2").where(step=[100, 300])
    assert some["step"].tolist() == [100, 300]
    assert some.tally(1).sxx == tally_of(a_tensor(306)).sxx
    assert np.array_equal(some.tallies.exponents[0], tally_of(a_tensor(106)).exponents)
    assert len(table.where(layer="nobody")) == 0
    assert np.array_equal(table.take([3, 1])["tensor"], ["weight", "weight"])


def test_slots_and_groups(run: Run) -> None:
    """Every cast once, with its rows in the order of steps."""
    table = run.table()
    assert table.slots() == [key(f"layers.{i}.mlp.fc2", t) for i in (0, 1) for t in ("input", "weight")]
    groups = list(table.take(np.arange(len(table))[::-1]).groups())
    assert len(groups) == 4
    assert all(rows["step"].tolist() == [100, 200, 300] for _, rows in groups)
    assert all(set(rows["layer"]) == {slot.layer} for slot, rows in groups)


def test_all_rows_as_one(run: Run) -> None:
    """A summary over steps is the merger of their tallies; of nothing, an empty one."""
    rows = run.table().where(layer="layers.0.mlp.fc2", tensor="input")
    merged = rows.merged()
    one_by_one = rows.tally(0) + rows.tally(1) + rows.tally(2)
    for f in tally_fields():
        assert np.allclose(getattr(merged, f.name), getattr(one_by_one, f.name), rtol=1e-12), f.name
    assert rows.where(step=-1).merged() == Tally()


def test_unknown_names_are_refused_with_the_nearest(run: Run) -> None:
    """A typo must not become an empty result."""
    with pytest.raises(RunError, match="underflow_pct"):
        run.table().metric("underflow_pc")
    with pytest.raises(RunError, match="tensor"):
        run.table().where(tenser="input")


# --- ranks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_merge_to_the_whole_batch(tmp_path: Path, ranks: int) -> None:
    """Rows of the batch over ranks: counts and histograms exactly those of one rank that had all of it."""
    x = a_tensor(5, ranks * BAND_ROWS)
    for rank in range(ranks):
        with RunWriter(tmp_path / "run", rank=rank) as writer:
            for step in (1, 2):
                writer.tally(step, key(), tally_of(x[rank * BAND_ROWS : (rank + 1) * BAND_ROWS] * step))
    run = Run.open(tmp_path / "run")
    assert run.ranks == list(range(ranks))
    merged, apart = run.table(), run.table(merge_ranks=False)
    assert (len(merged), len(apart)) == (2, 2 * ranks)
    assert "rank" not in merged.columns
    for i, step in enumerate((1, 2)):
        whole, got = tally_of(x * step), merged.tally(i)
        for f in tally_fields():
            if f.metadata.get("of_cast"):
                continue
            counts = f.name.startswith("n") or (f.metadata["bins"] and not f.name.startswith("energy"))
            close = np.array_equal if counts else np.allclose
            assert close(getattr(got, f.name), getattr(whole, f.name)), f.name
    again = merged.where(step=2)
    assert again.tallies.n.tolist() == [merged.tally(1).n]
    assert again.tallies.row_sqnr.sum() == merged.tally(1).row_sqnr.sum()


# --- damage and resumption ------------------------------------------------------------------------------------------


def test_a_torn_part_is_passed_over_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The other parts are read."""
    with RunWriter(tmp_path / "run", flush_rows=1) as writer:
        for step in (1, 2, 3):
            writer.tally(step, key(), tally_of(a_tensor(step)))
    part = tmp_path / "run" / STATS / "part-0-000001.parquet"
    part.write_bytes(part.read_bytes()[:-40])
    assert Run.open(tmp_path / "run").table()["step"].tolist() == [1, 3]
    assert "part-0-000001.parquet is torn" in caplog.text


def test_a_flipped_bit_in_a_page_names_its_part(tmp_path: Path) -> None:
    """Its checksum is looked at when its numbers are read."""
    with RunWriter(tmp_path / "run") as writer:
        writer.tally(1, key(), tally_of(a_tensor(1)))
    (part,) = (tmp_path / "run" / STATS).glob("*.parquet")
    data = part.read_bytes()
    said = []
    for at in range(100, len(data) // 2, len(data) // 40):
        part.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        try:
            Run.open(tmp_path / "run").table().dicts("amax", "mse", "row_sqnr_p50_db")
        except RunError as error:
            said.append(str(error))
    assert any(f"{part}: is damaged (could not verify page integrity" in one for one in said), said


def test_after_a_resumption_the_later_rows_count(tmp_path: Path) -> None:
    """Steps that were done twice are there once, as they were the second time."""
    with RunWriter(tmp_path / "run") as writer:
        for step in (1, 2, 3):
            writer.step(step, loss=float(step))
            writer.tally(step, key(), Tally(n=8, n_nonzero=8, n_underflow=1))
    with RunWriter(tmp_path / "run", append=True) as writer:
        for step in (3, 4):
            writer.step(step, loss=10.0 * step)
            writer.tally(step, key(), Tally(n=8, n_nonzero=8, n_underflow=4))
    run = Run.open(tmp_path / "run")
    assert run.steps["loss"].tolist() == [1, 2, 30, 40]
    assert run.table()["step"].tolist() == [1, 2, 3, 4]
    assert run.table().metric("underflow_pct").tolist() == [12.5, 12.5, 50, 50]


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "has neither watch.json nor manifest.json"),
        ('{"schema_version": 99}', "schema version 99; this ottava reads 1 and 2"),
        ("{}", "schema version None"),
        ('{"schema_ver', "is damaged"),
        ("[1, 2]", "is damaged"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    """Naming the file, and what is needed."""
    if content is not None:
        (tmp_path / MANIFEST).write_text(content, encoding="utf-8")
    with pytest.raises(RunError, match=words) as caught:
        Run.open(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_an_older_run_is_read_without_what_cannot_be_compared(tmp_path: Path) -> None:
    """Version 1 hashed batches in another way, and read the norm of the gradient after clipping."""
    with RunWriter(tmp_path / "run") as writer:
        writer.step(1, loss=2.0, grad_norm=1.0, input_hash=7.0, label_hash=8.0)
    manifest = tmp_path / "run" / MANIFEST
    manifest.write_text(json.dumps({"schema_version": 1, "versions": {"ottava": "0.8"}}), encoding="utf-8")
    steps = Run.open(tmp_path / "run").steps
    assert {name: values.tolist() for name, values in steps.items()} == {
        "step": [1],
        "loss": [2.0],
        "grad_norm_used": [1.0],
    }


@pytest.mark.parametrize("watched", [False, True])
def test_a_run_of_ottava_train_is_one_folder(tmp_path: Path, watched: bool) -> None:
    """Without a watch it has its losses and settings; with one, no number stands in two files."""
    from ottava.train.config import load_config
    from ottava.train.loop import Trainer

    model = "model={layers: 1, d_model: 32, heads: 2, kv_heads: 1, ffn: 32}"
    settings = [model, "batch_size=2", "sequence_length=32", "steps=3", "evaluation.batches=1", "recipe=tensorwise"]
    trainer = Trainer(load_config(None, [*settings, *(["watch={}"] if watched else [])]), tmp_path / "run")
    records = trainer.advance()
    trainer.close()
    run = Run.open(tmp_path / "run")
    for name in ("loss", "grad_norm", "lr", "tokens", "seconds"):
        assert run.steps[name].tolist() == [getattr(record, name) for record in records], "every digit"
    assert (run.manifest["config"]["recipe"], run.manifest["config"]["steps"]) == ("tensorwise", 3)
    assert (run.manifest["framework"], run.manifest["cast"], run.manifest["ended"]) == (
        ["ottava"],
        {"ran": True},
        "closed",
    )
    assert len(run.table()) == 0 or watched
    assert "tensorwise" in {layer["recipe"] for layer in run.manifest["layers"]}
    if watched:
        lines = [json.loads(line) for line in (tmp_path / "run" / STEPS).read_text().splitlines()]
        assert not {"loss", "grad_norm", "lr", "tokens", "seconds"} & {name for line in lines for name in line}
        assert set(run.steps["forwards"]) == {1.0}


def test_a_run_without_statistics_has_an_empty_table(tmp_path: Path) -> None:
    """Stopped before its first look: everything works, and is empty."""
    RunWriter(tmp_path / "run").close()
    run = Run.open(tmp_path / "run")
    table = run.table()
    assert (len(table), table.slots(), list(table.groups()), table.dicts(), run.ranks) == (0, [], [], [], [])
    assert table.metric("row_sqnr_p50_db").shape == (0,)
    assert table.merged() == Tally()
    assert run.steps["step"].tolist() == []
    assert run.events == []


def test_lines_that_are_no_steps_are_passed_over(tmp_path: Path) -> None:
    """Blank, damaged, other JSON; numbers as strings, missing numbers."""
    RunWriter(tmp_path / "run").close()
    lines = '{"step": 2, "loss": "nan"}\n\nnonsense\n[1]\n{"loss": 3}\n{"step": 1, "loss": 2.5, "lr": 0.1}\n'
    (tmp_path / "run" / STEPS).write_text(lines, encoding="utf-8")
    steps = Run.open(tmp_path / "run").steps
    assert steps["step"].tolist() == [1, 2]
    assert steps["loss"][0] == 2.5
    assert np.isnan([steps["loss"][1], steps["lr"][1]]).all()


def test_steps_of_the_trainer_are_read_where_the_watch_has_none(tmp_path: Path) -> None:
    """`ottava train` writes metrics.jsonl in the same words."""
    RunWriter(tmp_path / "run").close()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 7, "loss": 1.5}\n', encoding="utf-8")
    assert Run.open(tmp_path / "run").steps["loss"].tolist() == [1.5]


def test_reported_numbers_stand_where_sums_are_missing(tmp_path: Path) -> None:
    """Another tool's finished statistics: those, and NaN for all else."""
    with RunWriter(tmp_path / "run") as writer:
        writer.tally(1, key(), Tally(), reported={"underflow_pct": 12.5, "amax": 3.0})
    table = Run.open(tmp_path / "run").table()
    assert table.metric("underflow_pct").tolist() == [12.5]
    assert table.metric("amax").tolist() == [3.0]
    assert np.isnan(table.metric("sqnr_db")).all()


def test_finished_statistics_of_ranks_are_merged_by_the_worst(tmp_path: Path) -> None:
    """A mean would hide the one rank that is bad; a NaN of one hides no number of another."""
    known = (
        {"underflow_pct": 1.0, "row_sqnr_p50_db": 30.0, "scale_min": 4.0, "std": float("nan")},
        {"underflow_pct": 60.0, "row_sqnr_p50_db": 14.0, "scale_min": 2.0, "std": 1.5},
    )
    for rank, values in enumerate(known):
        with RunWriter(tmp_path / "run", rank=rank) as writer:
            writer.tally(1, key(), Tally(), reported=values)
    table = Run.open(tmp_path / "run").table()
    merged = {name: table.metric(name).tolist() for name in known[0]}
    assert merged == {"underflow_pct": [60.0], "row_sqnr_p50_db": [14.0], "scale_min": [2.0], "std": [1.5]}


# --- time and size --------------------------------------------------------------------------------------------------


def test_a_model_of_400_casts_and_100_looks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measured on one core: 3.4 s to write, 2 s to read, 13 MB (400 different
    tallies); the bounds leave a factor of 10."""
    tallies = [tally_of(a_tensor(seed, 128)) for seed in range(400)]
    keys = [key(f"layers.{i // 12}.linear{i % 4}", ("input", "weight", "grad_output")[i % 3]) for i in range(396)]
    keys += [key(f"head.{i}") for i in range(4)]
    assert len(set(keys)) == 400
    began = time.process_time()
    with RunWriter(tmp_path / "run") as writer:
        for look in range(100):
            for i, slot in enumerate(keys):
                writer.tally(look * 100, slot, tallies[(i + 7 * look) % 400])
    written = time.process_time()
    table: Table = Run.open(tmp_path / "run").table()
    worst = [np.nanmax(table.metric(name)) for name in ("underflow_pct", "row_sqnr_p50_db", "block_spread_p99")]
    groups = sum(1 for _ in table.groups())
    read = time.process_time()
    size = sum(path.stat().st_size for path in (tmp_path / "run" / STATS).iterdir())
    with capsys.disabled():
        print(
            f"\n40,000 rows: written in {written - began:.1f} s, read in {read - written:.1f} s, "
            f"{size / 1e6:.1f} MB, {size / 40_000:.0f} B a row"
        )
    assert len(table) == 40_000
    assert groups == 400
    assert np.isfinite(worst).all()
    assert written - began < 35
    assert read - written < 25
    assert size < 130e6
