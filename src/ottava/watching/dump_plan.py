"""Decides which casts a watch writes to files: those of the settings, and after a trigger the worst ones."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ottava.measure.layer_names import matches
from ottava.measure.statistics import STATISTICS
from ottava.measure.tally import Tallies, Tally
from ottava.numerics.tensor import QuantizedTensor
from ottava.record.dumps import Dumper
from ottava.record.schema import SlotKey
from ottava.record.writer import RunWriter
from ottava.watching.config import DumpConfig, Period

_HEALTH = "row_sqnr_p50_db"


class DumpPlan:
    """Chooses casts and passes them to a `Dumper`.

    Args:
        config: settings of dumps.
        writer: the run's writer.
    """

    def __init__(self, config: DumpConfig, writer: RunWriter) -> None:
        self.config = config
        self._dumper = Dumper(writer, int(config.quota_gb * 2**30), config.rows)
        self._step = 0
        self._periods: list[Period] = []
        self._health: dict[SlotKey, float] = {}
        self._suspects: set[SlotKey] = set()

    def begin(self, step: int) -> bool:
        """Begins a step; True if a cast of it will be written, so that it needs a full look."""
        self._step = step
        self._periods = [period for period in self.config.periods if period.chooses(step)]
        return step in self.config.steps or bool(self._suspects or self._periods)

    def wants(self, key: SlotKey) -> bool:
        """Whether to write this cast of the running step."""
        if key in self._suspects or any(period.has(key.layer, key.tensor) for period in self._periods):
            return True
        scheduled = self._step in self.config.steps and key.tensor in self.config.tensors
        return scheduled and matches(key.layer, self.config.layers or ("*",))

    def take(self, key: SlotKey, x: Tensor, x_q: QuantizedTensor) -> None:
        """Writes a cast: all of x (R, C) before it, and x_q; once a step, in the first micro-batch."""
        self._suspects.discard(key)
        self._dumper.dump(self._step, key, x.detach(), x_q)

    def looked(self, tallies: Mapping[SlotKey, Tally]) -> None:
        """Adds the tallies of a full look."""
        if tallies:
            values = STATISTICS[_HEALTH].finish(Tallies.of(tallies).rows)
            self._health |= dict(zip(tallies, values.tolist(), strict=True))

    def triggered(self) -> None:
        """Marks the casts with the lowest row SQNR; the next look writes them."""
        ranked = sorted((value, key) for key, value in self._health.items() if value == value)
        self._suspects |= {key for _, key in ranked[: self.config.on_trigger]}
