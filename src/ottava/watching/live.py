"""What a running watch says of its training, as numbers for a log: within a budget, from memory.

A door to a trainer asks `Live.numbers` at each log. Measured numbers change with a look; `diagnose` is asked after each
experiment, for a loss that is not finite, and else as often as the budget allows.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from ottava.diagnose.diagnose import Diagnosis, diagnose
from ottava.diagnose.facts import Facts
from ottava.diagnose.loss import Event, event
from ottava.measure.limits import WINDOW
from ottava.nn.receipt import receipt
from ottava.record.schema import EXPERIMENTS, STEPS

if TYPE_CHECKING:
    from ottava.watching.session import Watch

_ASKING = 0.1
"""Share of the budget for asking `diagnose` while the training runs."""
Numbers = dict[str, float | str]


class Live:
    """The numbers of a watch that runs; docs/doors.md has their table.

    Args:
        watch: the watch of this process, of rank 0.
        model: the model that it watches.
        share: share of the training's time that watching may take.
    """

    def __init__(self, watch: Watch, model: nn.Module, share: float) -> None:
        self.event: Event | None = None
        """The loss has left its band and stays outside; None: it has not."""
        self.diagnosis: Diagnosis | None = None
        """The last diagnosis of the last 256 steps."""
        self._watch, self._model, self._share = watch, model, share
        self._began, self._asked = time.perf_counter(), 0.0
        self._told = watch.steps_done
        self._look, self._worst = -1, Numbers()
        self._tried: object = None

    def numbers(self) -> Numbers:
        """Of the steps since the last call, of the last look, and of the last experiment."""
        lines = self._watch.writer.recent
        new = [line for line in lines[STEPS] if line["step"] > self._told]
        norms = [line["grad_norm"] for line in new if "grad_norm" in line]
        found = Numbers({"ottava/grad_norm": max(norms)} if norms else {}) | self._measured()
        self._judge(broken=not all(math.isfinite(line.get("loss", 0.0)) for line in new))
        found |= {} if self.diagnosis is None else {"ottava/fp8_verdict": self.diagnosis.fp8}
        found |= {} if self.event is None else {"ottava/loss_event": self.event.step}
        errors = [line.get("error") for line in lines[EXPERIMENTS] if line["kind"] == "shadow"]
        found |= {"ottava/fp8_damage": float(errors[-1])} if errors and errors[-1] is not None else {}
        self._told = max((line["step"] for line in new), default=self._told)
        return found

    def _measured(self) -> Numbers:
        """Of the last look."""
        step, _ = self._watch.last_look
        if step != self._look:
            self._look, self._worst = step, {"ottava/fp8_share": receipt(self._model).fp8_fraction}
            recent = self._watch.recent()
            table = Facts(recent).real_casts()
            table = table if len(table) else recent.table()  # a model without FP8 has simulated casts only
            sqnr = table.metric("row_sqnr_p50_db")
            if np.isfinite(sqnr).any():
                worst = int(np.nanargmin(sqnr))
                self._worst["ottava/worst_sqnr_db"] = float(sqnr[worst])
                self._worst["ottava/worst_tensor"] = f"{table['layer'][worst]}/{table['tensor'][worst]}"
        return self._worst

    def _judge(self, *, broken: bool) -> None:
        began, last = time.perf_counter(), [*self._watch.writer.recent[EXPERIMENTS]][-1:]
        affordable = self._asked <= _ASKING * self._share * (began - self._began)
        if not (affordable or broken or last != self._tried):
            return
        self._tried, recent = last, self._watch.recent()
        self.diagnosis, facts = diagnose(recent), Facts(recent)
        happened = event(facts.loss, guess=facts.guess)
        known = happened is not None and (happened.kind == "not finite" or len(facts.steps) >= 2 * WINDOW)
        self.event = happened if known and happened is not None and happened.stays is not None else None
        self._asked += time.perf_counter() - began
