"""Hostile files that once hung a command, filled the memory or ended in a traceback; `fuzz` has those by chance."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from fuzz.mutations import record
from fuzz.parsers import watched
from ottava.cli.app import app
from ottava.interop.contents import StateFileError, read_contents
from ottava.interop.event_file import masked_crc, read_scalars
from ottava.interop.importers import import_run
from ottava.interop.safe_pickle import DamagedError, load_pickle, load_torch
from ottava.record.reader import Run
from ottava.record.schema import RunError


def read_run(path: Path) -> object:
    """All that a run folder offers; `path` is one of its files."""
    run = Run.open(next(parent for parent in path.parents if (parent / "watch.json").exists()))
    table = run.table()
    return run.steps, run.events, table.metric("row_sqnr_p50_db"), table.merged()


def test_a_parquet_part_whose_columns_are_others_is_refused(tmp_path: Path) -> None:
    """One that is missing, of another type, with a number beyond all steps, with nothing, with too many bins."""
    folder = watched(tmp_path / "run")
    (part,) = (folder / "stats").glob("*.parquet")
    whole = pq.read_table(part)
    rows = whole.num_rows
    for name, values, says in (
        ("layer", None, "0 columns 'layer'"),
        ("step", ["x"] * rows, "column 'step' holds string"),
        ("step", [2**60] * rows, "step number"),
        ("tensor", [None] * rows, "rows without a value"),
        ("amax", [[1.0]] * rows, "column 'amax' holds list"),
        ("row_sqnr", [[1] * 5000] * rows, "'row_sqnr' has bins beyond its 128"),
        ("exponents_first", [1000] * rows, "'exponents' has bins beyond its 1024"),
        ("exponents_first", [-3] * rows, "bins beyond"),
        ("reported", ["x"] * rows, "column 'reported' holds string"),
    ):
        table = whole.drop_columns([name])
        pq.write_table(table if values is None else table.append_column(name, [values]), part)
        with pytest.raises(RunError, match=says):
            read_run(part)
    (folder / "stats" / "part-a-b.parquet").write_bytes(b"")
    with pytest.raises(RunError, match="is no part"):
        read_run(part)


def test_commands_on_a_damaged_run_end_with_a_sentence(tmp_path: Path) -> None:
    """report, diagnose, compare, what-if: what the readers let through does no harm further on."""
    good, bad = watched(tmp_path / "good"), watched(tmp_path / "bad")
    commands = (["report", bad], ["diagnose", bad, "--json"], ["compare", good, bad, "--json"], ["what-if", bad])
    deep = "[" * 5000 + "]" * 5000
    for name, content, readers in (
        ("watch.json", deep, 4),
        ("watch.json", '{"schema_version": 1, "layers": 5, "coverage": [], "settings": "x"}', 4),
        ("watch.json", '{"schema_version": 2, "coverage": {"linear": 2}}', 4),
        ("watch.json", '{"schema_version": 2, "coverage": {"linear": 2, "seen": 2, "skipped": [null]}}', 4),
        ("watch.json", '{"schema_version": 2, "layers": [{"casts": {}}], "command": 1.5}', 4),
        ("steps.jsonl", f'{{"step": 1, "loss": {deep}}}', 3),
        ("events.jsonl", '{"step": [1], "kind": "burst"}', 2),
    ):
        whole = (bad / name).read_bytes()
        (bad / name).write_text(content)
        for words in commands[:readers]:
            with pytest.raises(RunError, match=name.replace(".", r"\.")):
                app(list(map(str, words)), standalone_mode=False)
        (bad / name).write_bytes(whole)


def test_the_files_of_the_review_are_refused_at_once(tmp_path: Path) -> None:
    """Each hung a command, filled the memory or ended in a traceback."""
    shared: Any = {"fc.quantizers.input.scale": torch.ones(())}
    for _ in range(28):
        shared = {"a": shared, "b": shared}
    torch.save(shared, tmp_path / "shared.pt")
    expanded = torch.zeros(1).expand(10**12)
    torch.save({"fc.quantizers.input.amax_history": expanded}, tmp_path / "expanded.pt")
    began = time.process_time()
    for name, says in (("shared.pt", "counted along every path"), ("expanded.pt", "more numbers than the file")):
        with pytest.raises(StateFileError, match=says):
            read_contents(tmp_path / name)
    claim = struct.pack("<Q", 40 << 30)
    events = tmp_path / "events.out.tfevents.1"
    events.write_bytes(claim + struct.pack("<I", masked_crc(claim)) + b"x" * 100)
    assert list(read_scalars(events)) == []
    events.write_bytes(record(b"\x10" + b"\xff" * 1_000_000))
    with pytest.raises(ValueError, match="a whole number without end"):
        list(read_scalars(events))
    assert time.process_time() - began < 10


def test_an_import_names_what_it_leaves_out(tmp_path: Path) -> None:
    """FIFOs, steps of 10**30, tensors on no device, opcodes that nobody knows, settings without end."""
    source = tmp_path / "source"
    source.mkdir()
    line = "INFO - layers.0.fc1_activation_std \t iteration={} \t value=1.5\n"
    steps = ("000100", "1" + "0" * 30, "9" * 3900)
    (source / "globalrank-0.log").write_text("x" * 100_000 + "iteration=1\n" + "".join(map(line.format, steps)))
    os.mkfifo(source / "globalrank-1.log")
    os.mkfifo(source / "events.out.tfevents.1")
    (source / "config.yaml").write_text("[" * 5000)
    name = "decoder_layers_0_mlp_fc1_activation_iter_{}.pt"
    torch.save({"high_precision": torch.ones(32, 32, device="meta")}, source / name.format(1))
    torch.save({"high_precision": torch.ones(32, 32)}, source / name.format(10**30))
    (source / name.format(2)).write_bytes(b"\x80\x02\xfe.")
    torch.save({"high_precision": torch.ones(32, 32)}, source / name.format(3))
    run = import_run(source, tmp_path / "run")
    assert run.table()["step"].tolist() == [100, 3]
    notes = "\n".join(run.manifest["imported"]["notes"])
    for says in (
        "globalrank-1.log: is a FIFO; needs a regular file",
        "events.out.tfevents.1: is a FIFO",
        "left out config.yaml (is nested more than 64 deep)",
        "iter_1.pt: a tensor of shape (32, 32) is on meta",
        "iter_2.pt: is no whole pickle",
        "left out step 1" + "0" * 19 + " of rank 0",
    ):
        assert says in notes, notes
    with pytest.raises(ValueError, match="is a FIFO"):
        import_run(source / "events.out.tfevents.1", tmp_path / "run2")


def test_a_pickle_of_a_hundred_bytes_takes_no_time_and_no_memory(tmp_path: Path) -> None:
    """A key whose hash takes 2**60 steps, tuples too deep for C, claims, a place far away, zeros by the number."""
    doubled = (
        b"\x80\x04)"
        + b"\x94h\x00h\x00\x86"
        + b"".join(b"\x94h" + bytes([i]) * 1 + b"h" + bytes([i]) + b"\x86" for i in range(1, 60))
    )
    began = time.process_time()
    for data, says in (
        (b"\x80\x04}" + doubled[2:] + b"Ns.", "counted along every path"),
        (b"\x80\x04)" + b"\x85" * 100_000 + b".", "nested more than 500"),
        (b"\x80\x04\x8e" + struct.pack("<Q", 40 << 30) + b"x.", "no whole pickle"),
        (b"\x80\x05\x96" + struct.pack("<Q", 1 << 62) + b"x.", "no whole pickle"),
        (b"\x80\x02Nr" + struct.pack("<I", 2**31) + b".", "at place 2147483648"),
        (b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.", "bytearray of 2,147,483,647 zeros"),
        (b"\x80\x02\xfe.", "unknown"),
        (b"\x80\x02h\x05.", "no whole pickle"),
    ):
        with pytest.raises(DamagedError, match=says):
            load_pickle(data)
        (tmp_path / "a.pt").write_bytes(data)
        with pytest.raises(DamagedError, match=says):  # a file would allocate what a read asks for
            load_torch(tmp_path / "a.pt")
    torch.save({"a": torch.ones(300)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    count = b"M" + struct.pack("<H", 300)
    (tmp_path / "a.pt").write_bytes((tmp_path / "a.pt").read_bytes().replace(count, b"J" + struct.pack("<i", 2**30), 1))
    with pytest.raises(DamagedError, match="claims a storage of 1,073,741,824 numbers, and has 1,553 bytes"):
        load_torch(tmp_path / "a.pt")
    assert time.process_time() - began < 5
