"""Watching several processes: DDP, FSDP2, tensor parallel layers, and a script under torchrun. Gloo, CPU only."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from watch_scenarios import SCENARIOS

import warm
from ottava.debug.run.reader import Run

SIZE = 2
_LIMIT = 120


def run_all(rank: int, folder: str) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=SIZE, timeout=timedelta(seconds=180)
    )
    results: dict[str, str] = {}
    for scenario in SCENARIOS:
        try:
            scenario()
            results[scenario.__name__] = ""
        except Exception:
            results[scenario.__name__] = traceback.format_exc()
        Path(folder, f"{rank}.json").write_text(json.dumps(results))
        dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """The results of each rank; one start of the processes runs all scenarios."""
    folder = tmp_path_factory.mktemp("watch")
    context = warm.start_ranks(run_all, (str(folder),), SIZE)
    deadline = time.monotonic() + _LIMIT
    try:
        while not context.join(timeout=1) and time.monotonic() < deadline:
            pass
    finally:
        for process in context.processes:
            if process.is_alive():
                process.terminate()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(SIZE)]


def test_every_scenario_holds_on_every_rank(results: list[dict[str, str]]) -> None:
    """See the scenarios' own docstrings. One test: workers of pytest-xdist would each start the processes again."""
    failures = [
        f"{scenario.__name__}, rank {rank}: {said}"
        for scenario in SCENARIOS
        for rank, answers in enumerate(results)
        if (said := answers.get(scenario.__name__, "did not answer"))
    ]
    assert not failures, "\n".join(failures)


SCRIPT = """
import os, sys, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.full((4, 64), 1.0 + dist.get_rank())).square().mean().backward()
    optimizer.step()
os.write(1, f"rank {dist.get_rank()} argv {sys.argv}\\n".encode())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_under_torchrun_every_rank_is_on_record(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    words = ["ottava", "watch", "--out", "run", "--", "train.py", "--lr", "1"]
    done = subprocess.run([*launcher, *words], cwd=tmp_path, capture_output=True, text=True, timeout=_LIMIT)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} argv ['train.py', '--lr', '1']" in done.stdout
    assert done.stderr.count("3 steps, 2 of 2 linear layers seen") == 1
    run = Run.open(tmp_path / "run")
    assert sorted(run.ranks) == [0, 1]
    table = run.table(phase="full", merge_ranks=False).where(layer="0", tensor="input")
    assert dict(zip(table["rank"].tolist(), table.metric("amax").tolist(), strict=True)) == {0: 1.0, 1: 2.0}
