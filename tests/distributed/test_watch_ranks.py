"""Watching several processes: DDP, FSDP2, tensor parallel layers, and a script under torchrun. Gloo, CPU only."""

from __future__ import annotations

from pathlib import Path

from ranks import all_hold, scenarios_of

import warm
from ottava.record.reader import Run


def test_every_scenario_holds_on_every_rank(tmp_path: Path) -> None:
    all_hold(2, tmp_path, scenarios_of("watch_scenarios"))


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


def test_under_torchrun_every_rank_is_on_record(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    words = ["ottava", "watch", "--out", "run", "--", "train.py", "--lr", "1"]
    done = warm.run([*launcher, *words], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} argv ['train.py', '--lr', '1']" in done.stdout
    assert done.stderr.count("3 steps, 2 of 2 linear layers seen") == 1
    run = Run.open(tmp_path / "run")
    assert sorted(run.ranks) == [0, 1]
    table = run.table(phase="full", merge_ranks=False).where(layer="0", tensor="input")
    assert dict(zip(table["rank"].tolist(), table.metric("amax").tolist(), strict=True)) == {0: 1.0, 1: 2.0}
