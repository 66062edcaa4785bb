"""Files that earlier versions wrote are read for ever: a run folder of each version is kept here and stays as it is.

run-3    `ottava train` on 2026-11-23: checkpoint format 3, manifest 1, watch schema of that day; BF16 weights that are
         rounded stochastically, int8 moments, recipe delayed, two of four steps
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from ottava.record.reader import Run
from ottava.train.checkpoint import find_checkpoint, high_precision_weights

OLD = Path(__file__).parent


def test_a_run_of_checkpoint_format_3_is_read_to_the_bit() -> None:
    checkpoint, problems = find_checkpoint(OLD / "run-3")
    assert problems == []
    assert checkpoint.step == 2
    total = hashlib.sha256()
    for name, tensor in sorted(checkpoint.tensors.items()):
        total.update(name.encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    assert total.hexdigest() == "a2882df960fa18510665921b314c11eaf4a6e4bf21f8bd0b53bd6699409958c1"
    weights = high_precision_weights(checkpoint)
    assert weights["embedding.weight"].shape == (256, 16)
    run = Run.open(OLD / "run-3")
    lines = [json.loads(line) for line in (OLD / "run-3" / "metrics.jsonl").read_text().splitlines()]
    assert run.steps["loss"].tolist() == [line["loss"] for line in lines]
    assert len(run.table()) == 15
    assert float(run.table().metric("amax").max()) == 2.96875
