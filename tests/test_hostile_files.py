"""Every parser of files from outside, with damaged ones: each reads what it can or says what is wrong, soon.

Damage is by chance, from a fixed seed, so that a failure comes again. An error must be one that the command line shows
as a sentence (exit code 2 or 4); anything else would be a traceback and "a bug of ottava's" for the user.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

import ottava
from ottava.base.untrusted import parse_json, parse_yaml
from ottava.cli.app import app, exit_code
from ottava.interop.contents import StateFileError, read_scaling_state
from ottava.interop.event_file import EventWriter, masked_crc, read_scalars
from ottava.interop.importers import import_run
from ottava.interop.safe_pickle import DamagedError, load_pickle
from ottava.measure.walk import measure
from ottava.nn.plan import Device
from ottava.record.amaxes import FILE_NAME, read_series
from ottava.record.dumps import read_dump, save_batch
from ottava.record.reader import Run
from ottava.record.schema import RunError, SlotKey
from ottava.record.writer import RunWriter

JUNK = (
    None,
    True,
    5,
    -1,
    1.5,
    float("nan"),
    float("inf"),
    "x",
    "",
    [],
    [5],
    ["x"],
    {},
    {"a": 5},
    10**30,
    -(2**60),
    [[1]],
)
"""Values that nobody expects where they stand."""

Read = Callable[[Path], object]


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Some bytes changed, cut away, repeated or put in."""
    data = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(6):
            case 0:
                del data[at:]
            case 1:
                del data[at : at + chance.randint(1, 20)]
            case 2:
                data[at:at] = data[at : at + chance.randint(1, 50)] * chance.choice((1, 30))
            case 3:
                data[at:at] = chance.choice((b"\xff" * 9, b"\0" * 8, b"[" * 300, b"9" * 40, b"-", b"\n", b"{}", b":"))
            case _:
                data[at : at + 1] = bytes([chance.randrange(256)])
    return bytes(data)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every part of a JSON value."""
    yield path
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(part, (*path, key))


def mistyped(content: bytes, chance: random.Random) -> bytes:
    """One value of one line of JSON replaced by something else."""
    whole = content.decode()
    lines = [whole] if whole.startswith("{\n") else whole.splitlines()
    number = chance.randrange(len(lines))
    value = json.loads(lines[number])
    path = chance.choice([*places(value)])
    if path:
        parent = value
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = chance.choice(JUNK)
    else:
        value = chance.choice(JUNK)
    lines[number] = json.dumps(value)
    return "\n".join(lines).encode() + b"\n"


def outcome(read: Read, path: Path) -> str:
    """What became of reading: "read", or the class of the error; it must be one that is shown as a sentence."""
    try:
        read(path)
    except Exception as error:
        if exit_code(error) not in (2, 4) or not str(error):
            raise
        return type(error).__name__
    return "read"


def fuzz(
    path: Path, read: Read, times: int, *, change: Callable[[bytes, random.Random], bytes] = damaged
) -> Counter[str]:
    """What became of so many damaged versions of a file; the whole one is put back."""
    whole, chance = path.read_bytes(), random.Random(path.name)
    assert outcome(read, path) == "read"
    outcomes = Counter[str]()
    for _ in range(times):
        path.write_bytes(change(whole, chance))
        outcomes[outcome(read, path)] += 1
    path.write_bytes(whole)
    return outcomes


def watched(folder: Path) -> Path:
    """A small run with everything in it that a reader asks for."""
    key = SlotKey("layers.1.mlp.down_proj", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
    torch.manual_seed(0)
    with RunWriter(folder) as writer:
        layer = {"name": key.layer, "kind": "fc2", "type": "Linear", "shape": [64, 64], "recipe": "tensorwise"}
        writer.describe(
            versions={"torch": "2"},
            host={"device": "cpu", "platform": "x", "world_size": 1},
            command=["python", "train.py"],
            config={"lr": 1e-3, "model": {"layers": 1}},
            settings={"recipes": ["tensorwise"], "every": 3},
            layers=[layer],
            coverage={"linear": 2, "seen": 1, "skipped": [{"name": "a", "why": "b"}]},
            overhead={"share": 0.1, "looks": 3, "watching_s": 1.0, "total_s": 5.0},
        )
        for step in range(1, 5):
            x = torch.randn(64, 64)
            writer.step(step, loss=2.0 - 0.1 * step, grad_norm=1.0)
            writer.tally(step, key, measure(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3))))
        writer.event(2, "trigger", reason="clipping", layer=key.layer, tensor="input", value=0.1, threshold=0.01)
        writer.event(3, "burst", until=4)
        writer.event(3, "check", check="scale", layer=key.layer, value=2.0)
    return folder


def read_run(path: Path) -> object:
    """All that a run folder offers; `path` is one of its files."""
    run = Run.open(next(parent for parent in path.parents if (parent / "watch.json").exists()))
    table = run.table()
    return run.steps, run.events, table.metric("row_sqnr_p50_db"), table.merged()


def test_a_damaged_run_folder_is_refused_or_read(tmp_path: Path) -> None:
    """Its manifest, its lines, its Parquet: bytes and, where there is JSON, values."""
    folder = watched(tmp_path / "run")
    (part,) = (folder / "stats").glob("*.parquet")
    for path in (folder / "watch.json", folder / "steps.jsonl", folder / "events.jsonl"):
        fuzz(path, read_run, 12)  # a torn line is passed over
        assert fuzz(path, read_run, 20, change=mistyped)["RunError"] > 0, path
    assert fuzz(part, read_run, 25)["read"] > 0


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
        ("steps.jsonl", f'{{"step": 1, "loss": {deep}}}', 3),
        ("events.jsonl", '{"step": [1], "kind": "burst"}', 2),
    ):
        whole = (bad / name).read_bytes()
        (bad / name).write_text(content)
        for words in commands[:readers]:
            with pytest.raises(RunError, match=name.replace(".", r"\.")):
                app(list(map(str, words)), standalone_mode=False)
        (bad / name).write_bytes(whole)
    chance = random.Random(3)
    for name in ("watch.json",):
        whole = (bad / name).read_bytes()
        for words in commands:
            (bad / name).write_bytes(mistyped(whole, chance))
            with contextlib.redirect_stdout(io.StringIO()):
                outcome(lambda _, words=words: app(list(map(str, words)), standalone_mode=False), bad)
        (bad / name).write_bytes(whole)


def record(payload: bytes) -> bytes:
    """A record of an event file around whatever."""
    length = struct.pack("<Q", len(payload))
    return length + struct.pack("<I", masked_crc(length)) + payload + struct.pack("<I", masked_crc(payload))


def test_damaged_event_files_and_logs_are_imported_as_far_as_they_go(tmp_path: Path) -> None:
    """Also where the checksums are right and what is under them is not."""
    writer = EventWriter(tmp_path)
    for step in range(4):
        writer.scalars(step, {"loss": float(step), "layers.0.fc1_activation_cur_amax": 2.0})
    writer.close()
    assert fuzz(writer.path, lambda path: list(read_scalars(path)), 60)["read"] > 0
    data = writer.path.read_bytes()
    payloads, at = [], 0
    while at < len(data):
        (size,) = struct.unpack("<Q", data[at : at + 8])
        payloads.append(data[at + 12 : at + 12 + size])
        at += 16 + size
    chance = random.Random(0)
    for number in range(60):
        writer.path.write_bytes(b"".join(record(damaged(payload, chance)) for payload in payloads))
        outcome(lambda path: list(read_scalars(path)), writer.path)
        if number < 5:
            outcome(lambda path, number=number: import_run(path, tmp_path / f"run{number}"), writer.path)
    log = tmp_path / "nvdlfw_inspect_globalrank-0.log"
    lines = [
        f"INFO - layers.0.fc1_activation_{name} \t iteration=000100 \t value=12.5\n" for name in ("mse", "std", "max")
    ]
    log.write_text("".join(lines))
    counter = iter(range(100))
    fuzz(log, lambda path: import_run(path, tmp_path / f"log{next(counter)}"), 15)


def test_damaged_checkpoints_are_refused_or_read(tmp_path: Path) -> None:
    """torch.save in both of its forms, safetensors, and TransformerEngine's pickle in one of them."""
    state = {
        f"fc.quantizers.{tensor}.{part}": value
        for tensor in ("input", "weight")
        for part, value in (
            ("amax_history", torch.ones(4)),
            ("scale", torch.tensor(448.0)),
            ("nonfinite_count", torch.tensor(0)),
            ("guard_count", torch.tensor(0)),
        )
    }
    torch.save(state, tmp_path / "new.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file(state, tmp_path / "a.safetensors")
    te = {"scale_fwd": torch.ones(3), "amax_history_fwd": torch.ones(4, 3)}
    te |= {"scale_bwd": torch.ones(2), "amax_history_bwd": torch.ones(4, 2)}
    inner = torch.frombuffer(bytearray(pickle.dumps(te)), dtype=torch.uint8)
    torch.save({"fc._extra_state": inner}, tmp_path / "te.pt")
    for name in ("new.pt", "old.pt", "a.safetensors", "te.pt"):
        assert fuzz(tmp_path / name, read_scaling_state, 60)["StateFileError"] > 0, name
    path = tmp_path / "inner"
    path.write_bytes(pickle.dumps(te, protocol=4))
    assert fuzz(path, lambda path: load_pickle(path.read_bytes()), 300).keys() >= {"read", "DamagedError"}


def test_damaged_texts_are_refused_or_read(tmp_path: Path) -> None:
    """JSON, YAML, rule books, conditions, constants of a device, recordings, dumped batches."""
    files: dict[str, tuple[str, Read, int]] = {
        "a.json": (
            json.dumps({"rules": [{"id": "MINE", "support": ["amax > 1"]}], "q": {"ask": "?"}}),
            lambda path: parse_json(path.read_bytes()),
            100,
        ),
        "a.yaml": (
            "a: &x [1, 2.5, yes]\nb: {c: *x, d: '1'}\n",
            lambda path: parse_yaml(path.read_text("latin-1")),
            100,
        ),
        "device.json": ('{"constants": {"bf16": 1e14, "capability": [9, 0]}}', Device.read, 60),
    }
    for name, (text, read, times) in files.items():
        path = tmp_path / name
        path.write_text(text)
        fuzz(path, read, times)
        if text.startswith("{"):
            fuzz(path, read, times, change=mistyped)

    header = {"schema_version": 1, "tensors": [{"layer": "fc1", "tensor": "input", "format": "E4M3"}]}
    series = tmp_path / FILE_NAME
    series.write_text(
        "".join(json.dumps(line) + "\n" for line in (header, *({"step": i, "amax": [1.5]} for i in (1, 2))))
    )
    fuzz(series, lambda path: read_series(path.parent), 60)
    fuzz(series, lambda path: read_series(path.parent), 60, change=mistyped)
    batch = save_batch(tmp_path / "batch.safetensors", {"x": torch.ones(2), "y": [torch.zeros(1), 3]})
    fuzz(batch, read_dump, 100)


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
            read_scaling_state(tmp_path / name)
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


def test_a_pickle_of_a_hundred_bytes_takes_no_time_and_no_memory() -> None:
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
        (b"\x80\x05\x96" + struct.pack("<Q", 40 << 30) + b"x.", "no whole pickle"),
        (b"\x80\x02Nr" + struct.pack("<I", 2**31) + b".", "at place 2147483648"),
        (b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.", "bytearray of 2,147,483,647 zeros"),
        (b"\x80\x02\xfe.", "unknown"),
        (b"\x80\x02h\x05.", "no whole pickle"),
    ):
        with pytest.raises(DamagedError, match=says):
            load_pickle(data)
    assert time.process_time() - began < 5
