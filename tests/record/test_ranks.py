"""Ranks that lie apart are found, and the worst is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ottava
from ottava.measure.walk import measure
from ottava.record.ranks import rank_spread
from ottava.record.reader import Run
from ottava.record.schema import SlotKey
from ottava.record.writer import RunWriter

KEY = SlotKey("fc1", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")


def written(folder: Path, outlier_on: int | None, ranks: int = 3) -> Run:
    for rank in range(ranks):
        torch.manual_seed(0)
        x = torch.randn(64, 256)
        if rank == outlier_on:
            x[0] *= 1e5
        with RunWriter(folder, rank=rank) as writer:
            writer.tally(4, KEY, measure(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3))))
    return Run.open(folder)


@pytest.mark.parametrize("metric", ["underflow_pct", "row_sqnr_p50_db", "amax"])
def test_the_broken_rank_is_named(metric: str, tmp_path: Path) -> None:
    """Whichever way the statistic goes bad, although the merged number may look fine."""
    (spread,) = rank_spread(written(tmp_path / "run", outlier_on=1), metric)
    assert (spread.step, spread.key, spread.worst_rank, spread.ranks) == (4, KEY, 1, 3)
    assert spread.high > spread.low


def test_ranks_that_agree_have_no_spread(tmp_path: Path) -> None:
    """Bit for bit the same tensors."""
    (spread,) = rank_spread(written(tmp_path / "run", outlier_on=None), "amax")
    assert spread.low == spread.high
    assert spread.octaves == 0


def test_one_rank_has_none(tmp_path: Path) -> None:
    """There is nothing to compare; and a filter that leaves nothing gives nothing."""
    assert rank_spread(written(tmp_path / "one", outlier_on=None, ranks=1), "amax") == []
    assert rank_spread(written(tmp_path / "many", outlier_on=0), "amax", tensor="weight") == []
