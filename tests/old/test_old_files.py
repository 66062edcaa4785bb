"""Files that earlier versions wrote are read for ever: a run folder of each version is kept here and stays as it is.

run-2    `ottava train` of 2026-11-22: checkpoint format 2 (each norm a layer of its own), watch schema 1; delayed
run-3    `ottava train` of 2026-11-23: checkpoint format 3, manifest 1, watch schema 2; BF16 weights that are rounded
         stochastically, int8 moments, recipe delayed, two of four steps
shards-1 two processes of 2026-11-23: shards/1 from before their hashes, without a watch; BF16 weights with remainders
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from ottava.record.reader import Run
from ottava.train.checkpoint import find_checkpoint, high_precision_weights

OLD = Path(__file__).parent


@pytest.mark.parametrize(
    "name, step, digest, rows, amax",
    [
        ("run-2", 4, "6c043a7a38162d529b5fd8c4bed9a736a007954f81fc2d4f3055de433db26c23", 60, 5.1875),
        ("run-3", 2, "a2882df960fa18510665921b314c11eaf4a6e4bf21f8bd0b53bd6699409958c1", 15, 2.96875),
        ("shards-1", 2, "f2c1a6b9a51973fffbf50524d5d9bad76f40f3a193fc147598d473adac978de6", 0, None),
    ],
)
def test_an_old_run_is_read_to_the_bit(name: str, step: int, digest: str, rows: int, amax: float | None) -> None:
    checkpoint, problems = find_checkpoint(OLD / name)
    assert problems == []
    assert checkpoint.step == step
    total = hashlib.sha256()
    for key, tensor in sorted(checkpoint.tensors.items()):
        total.update(key.encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    assert total.hexdigest() == digest
    weights = high_precision_weights(checkpoint)
    assert weights["embedding.weight"].shape == (256, 16)
    assert "layers.0.mlp.gate_up_proj.norm.weight" in weights  # its name of today
    run = Run.open(OLD / name)
    lines = [json.loads(line) for line in (OLD / name / "metrics.jsonl").read_text().splitlines()]
    assert run.steps["loss"].tolist() == [line["loss"] for line in lines]
    table = run.table()
    assert len(table) == rows
    if amax is not None:
        assert float(table.metric("amax").max()) == amax
