"""Which casts of a step are written out: those asked for, and those that look worst once something happened."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ottava.debug.run.schema import SlotKey
from ottava.debug.run.writer import RunWriter
from ottava.debug.statistics import STATISTICS
from ottava.debug.tally import Tallies, Tally
from ottava.debug.watch.config import DumpConfig, matches
from ottava.debug.watch.dumps import Dumper
from ottava.quantized_tensor import QuantizedTensor

_HEALTH = "row_sqnr_p50_db"


class DumpPlan:
    """Chooses, and hands over to a `Dumper`.

    Args:
        config: what is asked for.
        writer: of the run.
    """

    def __init__(self, config: DumpConfig, writer: RunWriter) -> None:
        self.config = config
        self._dumper = Dumper(writer, int(config.quota_gb * 2**30), config.rows)
        self._step = 0
        self._health: dict[SlotKey, float] = {}
        self._suspects: set[SlotKey] = set()

    def begin(self, step: int) -> bool:
        """A step begins; whether something of it will be written, so that it must be looked at."""
        self._step = step
        return step in self.config.steps or bool(self._suspects)

    def wants(self, key: SlotKey) -> bool:
        """Whether that cast of the running step is written."""
        if key in self._suspects:
            return True
        asked = self._step in self.config.steps and key.tensor in self.config.tensors
        return asked and matches(key.layer, self.config.layers or ("*",))

    def take(self, key: SlotKey, x: Tensor, x_q: QuantizedTensor) -> None:
        """Writes a cast: x (R, C) before it, whole; one of each a step, the first micro-batch's."""
        self._suspects.discard(key)
        self._dumper.dump(self._step, key, x.detach(), x_q)

    def looked(self, tallies: Mapping[SlotKey, Tally]) -> None:
        """Takes in a full look."""
        if tallies:
            values = STATISTICS[_HEALTH].finish(Tallies.of(tallies).rows)
            self._health |= dict(zip(tallies, values.tolist(), strict=True))

    def triggered(self) -> None:
        """Something happened: the casts that looked worst are written at the next look."""
        known = sorted((value, key) for key, value in self._health.items() if value == value)
        self._suspects |= {key for _, key in known[: self.config.on_trigger]}
