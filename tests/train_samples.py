"""A training run so small that a test does several, and its curve."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path

from ottava.train.config import TrainConfig, load_config
from ottava.train.loop import Trainer
from ottava.train.run_folder import StepRecord

TINY = (
    "model={d_model: 32, layers: 1, heads: 2, kv_heads: 1, ffn: 48}",
    "data.max_bytes=200000",
    "batch_size=4",
    "sequence_length=32",
    "steps=12",
    "checkpoint.every=4",
    "evaluation={every: 5, batches: 2}",
)
SHORT = ("batch_size=2", "steps=6", "checkpoint.every=2", "evaluation={every: 0, batches: 1}")
STORED = ("optimizer.weights=fp8", "optimizer.master=remainder", "optimizer.moments=fp8")


def tiny(*overrides: str) -> TrainConfig:
    return load_config(None, [*TINY, *overrides])


def curve(history: list[StepRecord]) -> list[StepRecord]:
    """The history without the one field that a clock decides."""
    return [replace(record, seconds=0.0) for record in history]


@functools.cache
def whole_curve(*overrides: str) -> list[StepRecord]:
    """The curve of a run that nobody disturbs: what others must repeat. Trained once for all tests of a process."""
    with tempfile.TemporaryDirectory() as folder:
        return curve(Trainer(tiny(*overrides), Path(folder, "run")).advance())


def saved_curve(run: Path) -> list[StepRecord]:
    return curve([StepRecord.from_json(line) for line in (run / "metrics.jsonl").read_text().splitlines()])
