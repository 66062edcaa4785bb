"""Two ranks of a plain script under the watch: what they share, and where they part."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from diagnose.test_diagnose import NAMES, parameters, record
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


def test_ranks_are_compared_as_runs_of_one_program_on_other_data(tmp_path: Path) -> None:
    """Settings, steps, weights and gradients; but neither weights that are split nor what one rank may do alone."""
    other_data = {"change": lambda s: {"input_hash": 900.0 + s, "label_hash": 900.0 + s, "loss": 2.0}}
    grows = lambda n, s: {"weight": 0.02 + 0.001 * s} if s > 1 else {}  # noqa: E731
    names = {"weights": {n: f"{i + 50:016x}" for i, n in enumerate(NAMES)}}
    said: dict[str, tuple[dict[str, Any], str]] = {
        "healthy": (other_data, ""),
        "lr": ({"change": lambda s: {"lr": 0.1, "lr/0": 0.1, "input_hash": 900.0 + s}}, "The learning rate differs"),
        "steps": ({"change": lambda s: {"optimizer_steps": 1.0 + (s == 9), "input_hash": 900.0 + s}}, "Step 9 has 2"),
        "weights": ({**other_data, "move": grows}, "are no longer equal in the look at step 2."),
        "gradients": (
            {**other_data, "move": lambda n, s: {**grows(n, s), "gradient": 2e-3}},
            "their gradients differ from step 1 on: nobody averaged them",
        ),
        "an average now and then": (
            {
                "change": lambda s: {"input_hash": 900.0 + s, "weights": 7.0 + (s % 10 > 0)},
                "move": grows,
            },
            "",
        ),
        "averaged by the optimizer": ({**other_data, "move": lambda n, s: {"gradient": 2e-3}}, ""),
        "validation on one rank": ({"change": lambda s: {"forwards": 1.0 + (s == 9), "input_hash": 900.0 + s}}, ""),
    }
    for name, (how, sentence) in said.items():
        result = diagnose(record(tmp_path / name, lambda s: {"weights": 7.0}, ranks={1: how}))
        assert [f.id for f in result.findings] == (["R1"] if sentence else []), (name, result.sentence)
        assert sentence in result.sentence
    falls = lambda s: {"loss": 4.0 - 0.05 * s}  # noqa: E731
    harder = {1: {"change": lambda s: {"loss": 4.0 + 0.01 * s, "input_hash": 900.0 + s}}}
    assert not diagnose(record(tmp_path / "harder", falls, ranks=harder)).findings  # data of its own
    split = [{**p, "sharded": True} for p in parameters()]
    assert not diagnose(record(tmp_path / "split", ranks={1: {**other_data, "move": grows}}, parameters=split)).findings
    one = diagnose(record(tmp_path / "batches", ranks={1: {}}))
    assert (one.findings[0].id, "same batches" in one.sentence) == ("R1", True)
    (tmp_path / "loop" / "ranks").mkdir(parents=True)
    looped = record(tmp_path / "loop")
    (looped.path / "ranks" / "1").symlink_to(looped.path, target_is_directory=True)
    assert diagnose(Run.open(looped.path)).findings[0].id == "R1"  # its own batches
    # other weights, and the same gradient from other batches: nobody sent the first weights to all ranks
    folder = tmp_path / "unsent"
    run = record(folder, ranks={1: {**other_data, "move": lambda n, s: {"weight": 0.03}}})
    manifest = folder / "ranks" / "1" / "watch.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **names}), encoding="utf-8")
    assert "Ranks share their gradients and hold other weights" in diagnose(Run.open(run.path)).sentence
