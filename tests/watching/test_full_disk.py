"""A disk that refuses what a watch writes ends no training: it is said once, and tried again later.

The disk is full for a while, or to the end: a limit on the size of files, lowered in the middle of a run, refuses every
write to every file as a full disk does. (A real one, a tmpfs, needs the rights to mount it.)
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import warm
from ottava.interop.event_file import read_scalars
from ottava.record.dumps import TensorDump, read_dump
from ottava.record.reader import Run

LONG = "m" * 300  # longer than a file name may be
TRAINS = f"""
import resource, sys
import torch
from torch import nn
import ottava

def train(folder=None, until=0):
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module({LONG!r}, nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    if folder is not None:
        settings = dict(every=1, dump={{"steps": list(range(1, 9)), "tensors": "X"}}, sinks=["tensorboard"])
        seen = ottava.watch(model, folder, **settings)
    for step in range(1, 9):
        if step in (4, until):
            limit(1 if step == 4 and folder is not None else most)
        loss = model(torch.randn(4, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if folder is not None:
            seen.flush()
    if folder is not None:
        seen.rewind(8)
        seen.close()
    limit(most)
    return losses

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))

most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
bare = train()
assert train(sys.argv[1] + "/for-a-while", 7) == bare
assert train(sys.argv[1] + "/to-the-end", 99) == bare
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits on the size of a file")
def test_a_full_disk_ends_no_training(tmp_path: Path) -> None:
    """Statistics, steps and events wait until step 7, or are lost; dumps and sinks go on without. Files stay whole."""
    done = warm.run(["-c", TRAINS, str(tmp_path)], timeout=800)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("TensorBoardSink failed") == 2
    for name, until, lost in (("for-a-while", 7, "3 dumps"), ("to-the-end", 99, r"5 dumps, 15 rows, \d+ lines")):
        run = Run.open(tmp_path / name)
        assert done.stderr.count(f"{run.path}: cannot be written") == 1
        assert re.search(rf"{re.escape(str(run.path))}: lost {lost}, because the disk refused them", done.stderr)
        written = [step for step in range(1, 9) if step < 4 or step >= until]
        known = list(range(1, 9)) if until < 99 else written
        assert run.steps["step"].tolist() == known
        assert sorted(set(run.table()["step"].tolist())) == known
        (events,) = (run.path / "tensorboard").iterdir()
        assert sorted({scalar.step for scalar in read_scalars(events)}) == written
        dumps = [read_dump(path) for path in sorted((run.path / "dumps").iterdir())]
        assert [dump.step for dump in dumps] == written
        assert all(isinstance(dump, TensorDump) and dump.key.layer == LONG for dump in dumps)
        assert [path for path in run.path.rglob("*") if path.name.endswith(".part")] == []
    run = Run.open(tmp_path / "for-a-while")
    (warning,) = (event for event in run.events if event["kind"] == "warning")
    assert (warning["step"], "The training goes on" in warning["text"]) == (4, True)
    assert run.manifest["lost"] == {"dumps": 3}
