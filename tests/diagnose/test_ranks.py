"""Two ranks of a plain script under the watch: what they share, and where they part."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ottava.diagnose.diagnose import diagnose
from ottava.diagnose.facts import Facts
from ottava.diagnose.ranks import arrived
from ottava.record.reader import Run
from ottava.record.writer import RunWriter
from warm import Warm

SCRIPT = """
import os, sys
import torch
from torch import nn

word, rank = sys.argv[1], int(os.environ["RANK"])
torch.distributed.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
torch.manual_seed(rank if word == "seeds" else 0)
parts = [nn.Embedding(32, 32), nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 32)]
model = nn.Sequential(*parts)
wrapped = nn.parallel.DistributedDataParallel(model) if word in ("healthy", "one batch") else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(0 if word == "one batch" else rank)
for _ in range(20):
    x = torch.randint(0, 32, (16,), generator=data)
    optimizer.zero_grad()
    nn.functional.cross_entropy(wrapped(x), (3 * x + 1) % 32).backward()
    if word == "seeds":
        for p in model.parameters():
            torch.distributed.all_reduce(p.grad, torch.distributed.ReduceOp.SUM)
    optimizer.step()
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("healthy", "No fault found"),
        ("unwrapped", "their gradients differ from step 1 on: nobody averaged them"),
        ("seeds", "Ranks share their gradients and hold other weights"),
        ("one batch", "All 2 ranks train on the same batches"),
    ],
)
def test_two_ranks_are_told_from_two_that_have_parted(word: str, said: str, tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT, encoding="utf-8")
    command = ["-m", "ottava", "watch", "--out", str(folder), "--", str(script), word, f"file://{tmp_path}/meeting"]
    ranks = [Warm(command, env={**os.environ, "WORLD_SIZE": "2", "RANK": str(i), "LOCAL_RANK": str(i)}) for i in (0, 1)]
    for done in [rank.wait() for rank in ranks]:
        assert done.returncode == 0, done.stderr
    result = diagnose(Run.open(folder))
    assert said in result.sentence
    assert [f.id for f in result.findings] == ([] if word == "healthy" else ["R1"])


def test_what_arrives_is_held_against_the_average(tmp_path: Path) -> None:
    """By sums with random signs, which each rank writes: an average with any factor, its own gradient, or neither."""
    own = [[1.0 + i, -2.0, 3.0 * i, 1.0] for i in range(2)]
    mean = [(a + b) / 2 for a, b in zip(*own, strict=True)]
    for name, came in {"mean": [mean, [2 * x for x in mean]], "own": own, "codes": [own[1], mean]}.items():
        for rank in range(2):
            with RunWriter(tmp_path / name, rank=rank) as writer:
                writer.experiment(5, "shadow", mode="simulated", sketch=own[rank], arrived=came[rank])
                writer.flush()
        ((step, apart, alone),) = arrived(Facts(Run.open(tmp_path / name)))
        assert step == 5
        assert (apart < 1e-9, alone < 1e-9) == (name == "mean", name == "own")
