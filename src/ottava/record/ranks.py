"""Shows how far ranks differ. A mean over ranks hides a broken rank, and equal ranks that drift apart are a bug: amaxes
reduced over the wrong group (Megatron-LM PR 442) let tensor-parallel ranks drift apart for 1,000 steps."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ottava.measure.statistics import STATISTICS
from ottava.record.reader import Run
from ottava.record.schema import SlotKey


class RankSpread(NamedTuple):
    """One statistic of one cast in one step, over ranks."""

    step: int
    key: SlotKey
    metric: str
    low: float
    high: float
    worst_rank: int
    """The rank with the worst value; with the largest one if the statistic is never bad."""
    ranks: int
    """Number of ranks with a value."""

    @property
    def octaves(self) -> float:
        """log2(high / low); NaN unless both are positive."""
        return math.log2(self.high / self.low) if self.low > 0 and self.high > 0 else math.nan


def rank_spread(run: Run, metric: str, **wanted: Any) -> list[RankSpread]:
    """The spread of a statistic over ranks, in the order of steps; empty for a run of one rank.

    Args:
        run: the run.
        metric: a name of STATISTICS.
        wanted: columns and values that select rows, as in `Table.where`.

    Example:
        >>> import tempfile
        >>> from ottava.record.writer import RunWriter
        >>> from ottava.measure.tally import Tally
        >>> key = SlotKey("fc1", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for rank in (0, 1):
        ...         with RunWriter(f"{folder}/run", rank=rank) as writer:
        ...             writer.tally(1, key, Tally(n=8, amax=2.0 ** rank))
        ...     spreads = rank_spread(Run.open(f"{folder}/run"), "amax")
        >>> [(s.step, s.low, s.high, s.octaves) for s in spreads]
        [(1, 1.0, 2.0, 1.0)]
    """
    if len(run.ranks) < 2:
        return []
    table = run.table(merge_ranks=False).where(**wanted)
    values = table.metric(metric)
    sign = -1.0 if STATISTICS[metric].worse == "low" else 1.0
    spreads = []
    rows: dict[tuple[int, SlotKey], list[int]] = {}
    for i, (step, key) in enumerate(zip(table["step"], table.keys(), strict=True)):
        rows.setdefault((int(step), key), []).append(i)
    for (step, slot), index in sorted(rows.items(), key=lambda entry: entry[0][0]):
        index = [i for i in index if not np.isnan(values[i])]
        if len(index) > 1:
            worst = max(index, key=lambda i: sign * values[i])
            low, high = float(values[index].min()), float(values[index].max())
            spreads.append(RankSpread(step, slot, metric, low, high, int(table["rank"][worst]), len(index)))
    return spreads
