"""Decides which steps of a watched run get an experiment, captures them, and writes what came out.

A captured step costs little more than another one. Its experiments run between the last backward and the optimizer's
step, when weights, gradients and batch are at hand, and leave everything as it was. What cannot be tried is said, once.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ottava.experiments.bisect import Ablation
from ottava.experiments.casts import Casts, casts_of, casts_of_script
from ottava.experiments.handmade import Seen
from ottava.experiments.nonfinite import first_nonfinite
from ottava.experiments.passes import Player
from ottava.experiments.program import Program, Recorder
from ottava.experiments.rerun import CALM, Ring
from ottava.experiments.shadow import Shadow, nothing_changes, parameters_of
from ottava.experiments.surroundings import NotReplayableError
from ottava.measure.limits import gradient_hurts, robust_z
from ottava.recipe import Recipe

_LOG = logging.getLogger(__name__)
EARLY = (5, 10, 20, 50)
"""Steps of the first shadows, counted from the beginning of the watch; later ones are multiples of the period."""
_FREE, _SHARE = 3, 0.02
"""Shadows that the budget does not count, and the largest share of the run's time for the others."""
_PRICE = 4
"""Steps that a shadow takes the time of: two and a half passes forward and backward, and one forward."""
_SEARCH = 10
"""Shadows that an ablation takes the time of."""
_BETWEEN_TRIGGERS, _BETWEEN_REPLAYS = 20, 100
_SIMULATED = 2
"""Shadows of a run that casts nothing: what they show is a forecast."""
_GIVE_UP = 3
RECENT = 16
"""Losses before a step that say how much noise it has: over more of them, a loss that falls would seem noisy."""
_REFUSED = ("DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")

Write = Callable[..., None]
"""(step, kind, **facts)"""


class Laboratory:
    """Tries things with a training while it goes on.

    Args:
        roots: gives the models, as the training calls them.
        every: steps from one shadow to the next; 0: no shadows.
        replay: steps from one snapshot to the next; 0: none.
        recipe: what to simulate if nothing casts.
        write: gets each result.
        name_of: full name of a parameter.
        name_of_module: full name of a module.
        quiet: a context in which the watch sees nothing.
        step: steps done.
        share: of the run's time, for the shadows that no trigger asked for.
        early: False: the first shadow only, and then none before the share has paid for it.
    """

    def __init__(
        self,
        roots: Callable[[], Iterable[nn.Module]],
        *,
        every: int,
        replay: int = 0,
        recipe: str | Recipe,
        write: Write,
        name_of: Callable[[Tensor], str],
        name_of_module: Callable[[nn.Module], str],
        quiet: Callable[[], AbstractContextManager[Any]],
        step: int = 0,
        share: float = _SHARE,
        early: bool = True,
    ) -> None:
        self._share = min(share, _SHARE)
        self._early: tuple[int, ...] = EARLY if early else EARLY[:1]
        self._free = _FREE if early else 1
        if every and not early:  # counted in steps, because ranks must agree
            every = max(every, math.ceil(_PRICE / max(self._share, 1e-6)))
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
        self._pending: tuple[Shadow, dict[str, Any]] | None = None
        self._blamed: list[tuple[str, str]] = []
        self._ring = Ring(replay) if replay else None
        self._losses: deque[tuple[int, float]] = deque(maxlen=RECENT)
        self._found_nonfinite = self._event = self._wrong = False
        self._replayed = -_BETWEEN_REPLAYS
        self._refused: set[str] = set()
        self._seen: Seen | None = None
        self._conversions: Seen | None = None
        self._started = time.perf_counter()
        self.seconds = 0.0
        """Time that experiments took."""

    def begin(self, step: int) -> None:
        """A step begins: captures it if it is one to experiment with."""
        self.drop()
        self._step = step
        if self._ring is not None:
            self._between(step, self._ring)
        self._why = self._reason(step)
        if (self._why or self._ring is not None) and (roots := self._models(step)):
            self._recorder = recorder = Recorder(roots)
            if self._why and self._conversions is None and not recorder.compiled:
                self._seen = Seen(lambda: recorder.in_forward).begin()

    def backward(self, root: Tensor, loss: Tensor, gradient: Tensor | None, retain: bool) -> None:
        """A backward of the training begins."""
        if self._recorder is not None:
            self._recorder.backward(root, loss, gradient, retain)

    def triggered(self, reason: str) -> None:
        """Something happened: the next step is captured, and the last ones are replayed."""
        self._event = self._event or reason in ("loss_z", "nonfinite")
        self._wrong = self._wrong or reason == "nonfinite"
        self._asked = self._asked or f"trigger: {reason}"

    def lost(self, step: int, loss: float | None) -> None:
        """A step ended with this loss."""
        if loss is not None:
            recent = [earlier for _, earlier in self._losses if math.isfinite(earlier)]
            self._losses.append((step, loss) if math.isfinite(loss) else (step, math.inf))
            if not math.isfinite(loss):
                self.triggered("nonfinite")
            elif len(recent) == RECENT and robust_z(loss, recent) > CALM:
                self._event = True

    def forget(self) -> None:
        """The training went back: drops what a replay would start from."""
        if self._ring is not None:
            self._ring.forget()

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """What experiments run is no conversion of the script's."""
        if self._seen is not None:
            self._seen.active = False
        try:
            yield
        finally:
            if self._seen is not None:
                self._seen.active = True

    def _look_away(self) -> None:
        """Ends the watch over conversions, which goes from one optimizer step to the next."""
        if self._seen is not None:
            self._seen.end()
            self._conversions, self._seen = self._seen, None
            if (where := self._conversions.outside) is not None:
                self._write(self._step, "conversion", where=where)

    def drop(self) -> None:
        """Forgets what was captured."""
        self._look_away()
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
        if self._pending is not None:  # its optimizer never finished the step
            (_, facts), self._pending = self._pending, None
            self._write(self._step, "shadow", **facts, loss_after=None)

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step: runs the experiments."""
        if self._recorder is None:
            return None
        recorder, self._recorder = self._recorder, None
        program = recorder.finish()
        began = time.perf_counter()
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not program.forwards or not any(id(p) in held for m in program.modules for p in m.parameters()):
            return self._refuse("shadow", "no forward of the watched model was seen in the step")
        if self._why:
            with self._safely("shadow"):
                self._experiment(program)
        if self._ring is not None:
            with self._safely("replay"):
                self._ring.note(self._step, program, optimizer)
        self.seconds += time.perf_counter() - began
        return None

    @contextmanager
    def _safely(self, what: str) -> Iterator[None]:
        """A training must not end because an experiment fails."""
        try:
            with self._quiet(), self._unseen():
                yield
        except NotReplayableError as error:
            self._refuse(what, str(error))
        except Exception as error:
            self._failures += 1
            lines = str(error).splitlines() or [""]
            self._refuse(what, f"the repetition failed: {type(error).__name__}: {lines[0][:300]}")
            _LOG.debug("watch: an experiment failed", exc_info=True)

    def _between(self, step: int, ring: Ring) -> None:
        """Between two steps: replays the last ones if something happened, or keeps the moment."""
        began = time.perf_counter()
        with self._safely("replay"):
            if not _alone():
                raise NotReplayableError("the training runs in several processes, and one cannot repeat their steps")
            if self._event and step - self._replayed >= _BETWEEN_REPLAYS:
                self._event, self._replayed = False, step
                models = self._models(step)
                casts = casts_of(models, self._name_of_module, self._recipe)
                calm = [loss for _, loss in [*self._losses][:-1] if math.isfinite(loss)]
                if (found := ring.replay(casts, calm, self._blamed, self._name_of_module)) is not None:
                    self._write(step - 1, "replay", **found)
                    self._tell_nonfinite(step - 1, ring.nonfinite)
            ring.begin(step - 1)
        self.seconds += time.perf_counter() - began

    def after_step(self) -> None:
        """An optimizer has stepped: tries whether its own batch is better now, and writes the shadow step."""
        if self._pending is None:
            return
        (shadow, facts), self._pending = self._pending, None
        after = None
        if shadow.tail:
            began = time.perf_counter()
            try:
                with self._quiet(), self._unseen(), nothing_changes(shadow.program.modules):
                    after = shadow.loss_now()
            except Exception:  # a tensor of the loss, such as a tied head, was stepped: the batch cannot be repeated
                _LOG.debug("watch: the step's own batch was not repeated", exc_info=True)
            self.seconds += time.perf_counter() - began
        self._write(self._step, "shadow", **facts, loss_after=after)

    # --- which steps ----------------------------------------------------------------------------------------------

    def _reason(self, step: int) -> str:
        """Why this step is captured; "" if it is not."""
        if not self._every or self._failures >= _GIVE_UP:
            return ""
        if self._asked and step - self._last_trigger >= _BETWEEN_TRIGGERS:
            self._last_trigger, why, self._asked = step, self._asked, ""
            return why if _alone() or self._no_collectives(step) else ""
        number = step - self._first
        due = number in (n for n in self._early if n < self._every) or number % self._every == 0
        if not (due or self._postponed):
            return ""
        spent = self.seconds / max(time.perf_counter() - self._started, 1e-9)
        broke = self._shadows >= self._free and spent > self._share
        self._postponed = _alone() and broke  # ranks must agree, clocks do not
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
        parameters = parameters_of(program.modules)
        losses = [float(entry.loss.value()) for entry in program.backwards]
        if not self._found_nonfinite and (self._wrong or not all(map(math.isfinite, losses))):
            self._wrong = False
            player = Player(program, parameters)
            with nothing_changes(program.modules):
                found = first_nonfinite(player, self._name_of_module, tail=player.tail)
            self._tell_nonfinite(self._step, found)
            if found is None and not all(bool(p.isfinite().all()) for p in parameters):
                self._refuse(
                    "nonfinite",
                    "the weights were not finite any more in the first step that could be repeated; a watch with "
                    "replay=20 keeps the steps before",
                )
        casts = casts_of(program.modules, self._name_of_module, self._recipe)
        seen = self._seen or self._conversions
        if (casts is None or casts.mode == "simulated") and seen is not None and seen.model is not None:
            casts = casts_of_script(seen.model)
        if casts is None:
            return self._refuse("shadow", "the model has no layer that casts, and no linear layer to simulate casts in")
        if casts.mode == "simulated":
            if self._simulated >= _SIMULATED:
                return None
            self._simulated += 1
        shadow = Shadow(program, casts, parameters)
        with nothing_changes(program.modules):
            began = time.perf_counter()
            facts = shadow.facts(self._name_of)
            took = time.perf_counter() - began
            self._shadows += 1
            self._pending = (shadow, {"why": self._why, **facts})
            if casts.mode == "real" and self._ablates(facts, casts, took):
                search = Ablation(shadow.player, casts, shadow.exact, facts["error"], tail=shadow.tail)
                if (found := search.facts()) is not None:
                    self._ablated = self._step
                    self._blamed = [(entry["layer"], entry["gemm"]) for entry in found["set"]]
                    self._write(self._step, "ablation", **found)
        return None

    def _tell_nonfinite(self, step: int, found: dict[str, Any] | None) -> None:
        if found is not None and not self._found_nonfinite:
            self._found_nonfinite = True
            self._write(step, "nonfinite", **found)

    def _ablates(self, facts: Mapping[str, Any], casts: Casts, took: float) -> bool:
        """Whether the casts hurt, and the search for the worst of them is not too soon or, with a budget, too dear."""
        early = self._ablated is not None and self._step - self._ablated < self._every
        if early or facts["error"] is None:
            return False
        if not gradient_hurts(facts["error"], facts.get("noise"), facts.get("bias"), casts.bits):
            return False
        if self._early == EARLY or self._why != "schedule" or not _alone():  # ranks must agree, clocks do not
            return True
        budget = self._share * (time.perf_counter() - self._started)
        return self.seconds + _SEARCH * took < budget


def _alone() -> bool:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not distributed or torch.distributed.get_world_size() == 1
