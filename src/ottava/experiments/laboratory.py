"""Decides which steps of a watched run get an experiment, captures them, and writes what came out.

A captured step costs little more than another one. Its experiments run between the last backward and the optimizer's
step, when weights, gradients and batch are at hand, and leave everything as it was. What cannot be tried is said, once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ottava.experiments.ablation import Ablation
from ottava.experiments.casts import FOUR_BITS, Casts, casts_of
from ottava.experiments.program import Program, Recorder
from ottava.experiments.shadow import Shadow, nothing_changes, parameters_of
from ottava.experiments.surroundings import NotReplayableError
from ottava.recipe import Recipe

_LOG = logging.getLogger(__name__)
EARLY = (5, 10, 20, 50)
"""Steps of the first shadows, counted from the beginning of the watch; later ones are multiples of the period."""
_FREE, _SHARE = 3, 0.03
"""Shadows that the budget does not count, and the share of the run's time for the others."""
_BETWEEN_TRIGGERS = 20
_SIMULATED = 2
"""Shadows of a run that casts nothing: what they show is a forecast."""
_GIVE_UP = 3
_REFUSED = ("DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")

Write = Callable[..., None]
"""(step, kind, **facts)"""


class Laboratory:
    """Tries things with a training while it goes on.

    Args:
        roots: gives the models, as the training calls them.
        every: steps from one shadow to the next; 0: no experiments.
        recipe: what to simulate if nothing casts.
        write: gets each result.
        name_of: full name of a parameter.
        name_of_module: full name of a module.
        quiet: a context in which the watch sees nothing.
        step: steps done.
    """

    def __init__(
        self,
        roots: Callable[[], Iterable[nn.Module]],
        *,
        every: int,
        recipe: str | Recipe,
        write: Write,
        name_of: Callable[[Tensor], str],
        name_of_module: Callable[[nn.Module], str],
        quiet: Callable[[], AbstractContextManager[Any]],
        step: int = 0,
    ) -> None:
        self._roots, self._every, self._recipe, self._write = roots, every, recipe, write
        self._name_of, self._name_of_module, self._quiet = name_of, name_of_module, quiet
        self._first, self._step = step, step
        self._recorder: Recorder | None = None
        self._why = ""
        self._asked = ""
        self._last_trigger = -_BETWEEN_TRIGGERS
        self._postponed = False
        self._shadows = self._simulated = self._failures = 0
        self._ablated: int | None = None
        self._refused: set[str] = set()
        self._started = time.perf_counter()
        self.seconds = 0.0
        """Time that experiments took."""

    def begin(self, step: int) -> None:
        """A step begins: captures it if it is one to experiment with."""
        self._step = step
        self.drop()
        self._why = self._reason(step)
        if self._why and (roots := self._models(step)):
            self._recorder = Recorder(roots)

    def backward(self, root: Tensor, loss: Tensor, gradient: Tensor | None, retain: bool) -> None:
        """A backward of the training begins."""
        if self._recorder is not None:
            self._recorder.backward(root, loss, gradient, retain)

    def triggered(self, reason: str) -> None:
        """Something happened: the next step is captured."""
        self._asked = self._asked or f"trigger: {reason}"

    def drop(self) -> None:
        """Forgets what was captured."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step: runs the experiments."""
        if self._recorder is None:
            return
        recorder, self._recorder = self._recorder, None
        program = recorder.finish()
        began = time.perf_counter()
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not program.forwards or not any(id(p) in held for m in program.modules for p in m.parameters()):
            self._refuse("shadow", "no forward of the watched model was seen in the step")
            return
        try:
            with self._quiet():
                self._experiment(program)
        except NotReplayableError as error:
            self._refuse("shadow", str(error))
        except Exception as error:  # a training must not end because an experiment fails
            self._failures += 1
            self._refuse("shadow", f"the repetition failed: {type(error).__name__}: {str(error).splitlines()[0][:300]}")
            _LOG.debug("watch: an experiment failed", exc_info=True)
        self.seconds += time.perf_counter() - began

    # --- which steps ----------------------------------------------------------------------------------------------

    def _reason(self, step: int) -> str:
        """Why this step is captured; "" if it is not."""
        if not self._every or self._failures >= _GIVE_UP:
            return ""
        if self._asked and step - self._last_trigger >= _BETWEEN_TRIGGERS:
            self._last_trigger, why, self._asked = step, self._asked, ""
            return why if _alone() or self._no_collectives(step) else ""
        number = step - self._first
        due = number in (n for n in EARLY if n < self._every) or number % self._every == 0
        if not (due or self._postponed):
            return ""
        spent = self.seconds / max(time.perf_counter() - self._started, 1e-9)
        self._postponed = _alone() and self._shadows >= _FREE and spent > _SHARE  # ranks must agree, clocks do not
        return "" if self._postponed else "schedule"

    def _models(self, step: int) -> list[nn.Module]:
        models = []
        for root in self._roots():
            if type(root).__name__ in _REFUSED:
                self._refuse("shadow", f"{type(root).__name__} shards or copies the model by itself", step)
                return []
            models.append(root.module if type(root).__name__ == "DistributedDataParallel" else root)
        return models  # type: ignore[return-value]  # `module` of a wrapper is one

    def _no_collectives(self, step: int) -> bool:
        modules = [m for root in self._roots() for m in root.modules()]
        talks = any(hasattr(p, "device_mesh") for m in modules for p in m._parameters.values())
        talks = talks or any(isinstance(m, nn.SyncBatchNorm) or getattr(m, "sharding", None) for m in modules)
        if talks:
            self._refuse("shadow", "a trigger fires on one rank, and the forward of this model needs all of them", step)
        return not talks

    def _refuse(self, what: str, why: str, step: int | None = None) -> None:
        if why not in self._refused:
            self._refused.add(why)
            self._write(self._step if step is None else step, "refused", of=what, why=why)

    # --- experiments ----------------------------------------------------------------------------------------------

    def _experiment(self, program: Program) -> None:
        casts = casts_of(program.modules, self._name_of_module, self._recipe)
        if casts is None:
            return self._refuse("shadow", "the model has no layer that casts, and no linear layer to simulate casts in")
        if casts.mode == "simulated":
            if self._simulated >= _SIMULATED:
                return None
            self._simulated += 1
        shadow = Shadow(program, casts, parameters_of(program.modules))
        with nothing_changes(program.modules):
            facts = shadow.facts(self._name_of)
            self._shadows += 1
            self._write(self._step, "shadow", why=self._why, **facts)
            if casts.mode == "real" and self._ablates(facts["error"], casts):
                search = Ablation(shadow.player, casts, shadow.exact, facts["error"], tail=shadow.tail)
                if (found := search.facts()) is not None:
                    self._ablated = self._step
                    self._write(self._step, "ablation", **found)
        return None

    def _ablates(self, error: float | None, casts: Casts) -> bool:
        early = self._ablated is not None and self._step - self._ablated < self._every
        return error is not None and error > level(casts) and not early


def level(casts: Casts) -> float:
    """The error from which on casts are suspect."""
    return 0.45 if casts.bits <= FOUR_BITS else 0.15


def _alone() -> bool:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not distributed or torch.distributed.get_world_size() == 1
