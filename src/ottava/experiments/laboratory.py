"""Decides which steps of a watched run get an experiment, captures them, and writes what came out.

A captured step costs little more than another one. Its experiments run between the last backward and the optimizer's
step, when weights, gradients and batch are at hand, and leave everything as it was. What cannot be tried is said, once.

A `Ring` runs the last steps again from a snapshot: as they ran, without casts, and under remedies. It keeps one or two
snapshots on the CPU and what every step since has computed. Clipping is repeated by its law: where the run's gradient
was shortened to a length, a longer gradient of a replay is shortened to it, too.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ottava.base.errors import Guard
from ottava.experiments.bisect import Ablation
from ottava.experiments.casts import Casts, casts_of, only_without, with_sites
from ottava.experiments.logic import reasons
from ottava.experiments.nonfinite import first_nonfinite, nan_in_graph
from ottava.experiments.program import AS_IT_RAN, Gradients, Player, Program, Recorder, Way, has_compiled
from ottava.experiments.shadow import Shadow, nothing_changes, parameters_of, scaler_factor
from ottava.experiments.snapshot import NotReplayableError, Snapshot, stepped_by
from ottava.experiments.trace import Trace
from ottava.experiments.twin import STEPS, OptimizerTwin, keeps_codes, narrow
from ottava.measure.limits import LEAST, OVERSHOOTS, SUSPICIOUS, gradient_hurts, overshoots, robust_z
from ottava.recipe import Recipe, get_recipe
from ottava.weights.parameter import local

CALM = 6.0
"""A replay is inside the noise if its last loss is at most so many robust deviations above the median before."""
_REMEDIES = ("tensorwise", "rowwise", "blockwise")


@dataclass(frozen=True)
class _Step:
    """A step that can run again."""

    number: int
    program: Program
    settings: tuple[dict[str, Any], ...]
    """Of the optimizer's groups."""
    length: float
    """Norm of the gradient as the optimizer saw it."""


class Ring:
    """Keeps what a replay needs.

    Args:
        every: steps from one snapshot to the next.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._kept: deque[tuple[Snapshot, list[_Step]]] = deque(maxlen=2)
        self._optimizer: Optimizer | None = None
        self._model: nn.Module | None = None
        self.nonfinite: dict[str, Any] | None = None
        """The first operation of the last replay whose result was not finite; see `nonfinite`."""

    def note(self, number: int, program: Program, optimizer: Optimizer) -> None:
        """An optimizer is about to make this step."""
        if program.broken:
            raise NotReplayableError(f"no step can run again: {program.broken}")
        self._model, self._optimizer = nn.ModuleList(program.modules), optimizer
        if self._kept:
            settings = tuple({k: copy.copy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups)
            for forward in program.forwards:
                forward.gradients.clear()  # they are as large as the outputs
            length = _length([p.grad for p in stepped_by(optimizer)])
            self._kept[-1][1].append(_Step(number, program, settings, length))

    def begin(self, done: int) -> None:
        """A step begins: takes a snapshot if it is time."""
        if self._model is None or self._optimizer is None:
            return
        if not self._kept or done - self._kept[-1][0].step >= self.every:
            known = {id(p) for p in self._model.parameters()}
            if any(id(p) not in known for p in stepped_by(self._optimizer)):
                raise NotReplayableError("the optimizer holds parameters outside of the models that ran")
            self._kept.append((Snapshot.take(self._model, self._optimizer, done), []))

    def forget(self) -> None:
        """Drops everything."""
        self._kept.clear()

    def replay(
        self,
        casts: Casts | None,
        before: Sequence[float],
        blamed: Iterable[tuple[str, str]],
        name_of_module: Callable[[nn.Module], str],
    ) -> dict[str, Any] | None:
        """Runs the kept steps again; None: there are none.

        Args:
            casts: of the models.
            before: losses of the run before the event.
            blamed: the set of an ablation.
            name_of_module: full name of a module.
        """
        steps = [step for _, kept in self._kept for step in kept]
        if not steps or self._model is None or self._optimizer is None:
            return None
        snapshot, model, optimizer = self._kept[0][0], self._model, self._optimizer
        arms: list[dict[str, Any]] = []
        with nothing_changes([model]):
            present = Snapshot.take(model, optimizer, steps[-1].number)
            try:
                lengths: list[float] = []  # of gradients before clipping
                arms.append({"name": "as it ran", "losses": self._run(snapshot, steps, AS_IT_RAN, lengths=lengths)})
                if not math.isfinite(lengths[-1]):  # the weights are those before that step
                    program = steps[len(lengths) - 1].program
                    player = Player(program, parameters_of(program.modules))
                    self.nonfinite = first_nonfinite(player, name_of_module, tail=True)
                limit = _clipped_to(steps, lengths)
                ran = [_loss(step.program) for step in steps]
                differs = _difference(steps, ran, arms[0]["losses"])
                for name, way, lr in _others(casts, blamed):
                    losses = self._run(snapshot, steps, way, lr=lr, limit=limit)
                    arms.append({"name": name, "losses": losses, "calm": _calm(losses, before)})
                    if arms[-1]["calm"] and name != "high precision":
                        break
            finally:
                present.restore(model, optimizer)
        for arm in arms:
            arm["losses"] = [x if math.isfinite(x) else None for x in arm["losses"]]
        return {"from": steps[0].number, "reproduces": differs is None, "differs": differs, "arms": arms}

    def _run(
        self,
        snapshot: Snapshot,
        steps: Sequence[_Step],
        way: Way,
        *,
        lr: float = 1.0,
        limit: float | None = None,
        lengths: list[float] | None = None,
    ) -> list[float]:
        """The losses of the steps. lengths: gets those of the gradients, which are cut to the lengths of the run."""
        assert self._model is not None
        assert self._optimizer is not None
        snapshot.restore(self._model, self._optimizer)
        losses = []
        for step in steps:
            parameters = parameters_of(step.program.modules)
            found = Player(step.program, parameters).run(way, tail=True)
            ratio = scaler_factor(step.program)
            losses.append(math.fsum(float(x) for x in found.losses) / max(len(found.losses), 1) / ratio)
            gradients = [None if g is None else g / ratio if ratio != 1 else g for g in found.gradients]
            length = _length(gradients)
            if not (math.isfinite(losses[-1]) and math.isfinite(length)):
                if lengths is not None:
                    lengths.append(math.nan)
                break
            if lengths is not None:
                lengths.append(length)
                factor = step.length / length if length > 0 else 1.0
                factor = factor if abs(factor - 1) > 1e-5 else 1.0
            else:
                factor = min(1.0, limit / length) if limit is not None and length > 0 else 1.0
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient if gradient is None or factor == 1 else gradient * factor
            for group, settings in zip(self._optimizer.param_groups, step.settings, strict=True):
                group.update(settings)
                group["lr"] = settings["lr"] * lr
            self._optimizer.step()
        return losses


def _others(casts: Casts | None, blamed: Iterable[tuple[str, str]]) -> Iterable[tuple[str, Way, float]]:
    """Name, way and factor of the learning rate of every arm behind the first: remedies, cheapest first."""
    if casts is not None and casts.mode == "real":
        yield "high precision", casts.without, 1.0
        if casts.recipes:
            for name in _REMEDIES:
                if name != casts.recipe:
                    yield name, Way(partial(replace, recipe=get_recipe(name), enabled=True)), 1.0
        if blamed := list(blamed):
            yield "bf16 in " + ", ".join(f"{n} {g}".strip() for n, g in blamed), only_without(casts, blamed), 1.0
    yield "half the learning rate", AS_IT_RAN, 0.5


def _calm(losses: Sequence[float], before: Sequence[float]) -> bool | None:
    """Whether the last loss is inside the noise of those before the event; None: too few are known."""
    if len(before) < LEAST // 2:
        return None
    return math.isfinite(losses[-1]) and robust_z(losses[-1], before) <= CALM


def _clipped_to(steps: Sequence[_Step], lengths: Sequence[float]) -> float | None:
    """The length to which the run has cut its gradients; None: it has not, or changed them in another way."""
    pairs = [(step.length, length) for step, length in zip(steps, lengths, strict=False) if length > 0]
    cut = [used for used, length in pairs if math.isfinite(used) and used / length < 0.999]
    limit = max(cut, default=math.inf)
    return limit if cut and all(not step.length > 1.001 * limit for step in steps) else None


def _difference(steps: Sequence[_Step], ran: Sequence[float], again: Sequence[float]) -> str | None:
    for step, one, other in zip(steps, ran, again, strict=False):
        if not (one == other or (math.isnan(one) and math.isnan(other))):
            return f"the loss of step {step.number} was {one:.9g} and is {other:.9g}"
    return None


def _loss(program: Program) -> float:
    values = [float(entry.loss.value()) for entry in program.backwards]
    return math.fsum(values) / max(len(values), 1)


def _length(gradients: Gradients) -> float:
    norms = [torch.linalg.vector_norm(local(g), dtype=torch.float64) for g in gradients if g is not None]
    return float(torch.stack(norms).norm()) if norms else 0.0


_LOG = logging.getLogger(__name__)
EARLY = (5, 10, 20, 80, 320, 1280)
"""Steps of the first shadows, counted from the beginning of the watch; later ones are multiples of the period."""
_MEASURED = 4
"""First steps whose length is tried: a training that breaks at once does so before the first shadow."""
_LONGER = 100
"""Times a step that is tried where the step helps: a healthy one would go far too far."""
_SHARE = 0.02
"""The largest share of the run's time for shadows behind the first ones."""
_UNPAID, _CHEAP = EARLY[1], 1.0
"""Up to this step shadows come whatever they cost; the early ones behind it, if the last took no more seconds."""
_PRICE = 4
"""Steps that a shadow takes the time of: two and a half passes forward and backward, and one forward."""
_SEARCH = 10
"""Shadows that an ablation takes the time of."""
_BETWEEN_TRIGGERS, _BETWEEN_REPLAYS = 20, 100
_SIMULATED = 2
"""Shadows of a run that casts nothing: what they show is a forecast."""
_GIVE_UP = 3
_TRACED = 2
"""First steps whose calls are traced, of a run and behind a new optimizer; later, those of the shadows."""
_PHASES = 3
"""New optimizers whose first steps are traced: some scripts make one in every step."""
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
        keep: gets the trace of a step.
        name_of: full name of a parameter.
        name_of_module: full name of a module.
        quiet: a context in which the watch sees nothing.
        step: steps done.
        share: of the run's time, for the shadows that no trigger asked for.
        early: False: the first shadow only, and then none before the share has paid for it.
        guard: wraps the hooks of a step that is recorded.
    """

    def __init__(
        self,
        roots: Callable[[], Iterable[nn.Module]],
        *,
        every: int,
        replay: int = 0,
        recipe: str | Recipe,
        write: Write,
        keep: Callable[[int, dict[str, Any]], None],
        name_of: Callable[[Tensor], str],
        name_of_module: Callable[[nn.Module], str],
        quiet: Callable[[], AbstractContextManager[Any]],
        step: int = 0,
        share: float = _SHARE,
        early: bool = True,
        guard: Guard = lambda hook: hook,
    ) -> None:
        self._guard = guard
        self._share = min(share, _SHARE)
        self._early: tuple[int, ...] = EARLY if early else EARLY[:1]
        self._most_twins = int(early)  # a twin's eight steps are not paid for, either
        self._measured = _MEASURED if early and every else 0
        if every and not early:  # counted in steps, because ranks must agree
            every = max(every, math.ceil(_PRICE / max(self._share, 1e-6)))
        self._roots, self._every, self._recipe, self._write, self._keep = roots, every, recipe, write, keep
        self._name_of, self._name_of_module, self._quiet = name_of, name_of_module, quiet
        self._first = self._begun = self._step = step
        self._phases = 0
        self._recorder: Recorder | None = None
        self._why = ""
        self._asked = ""
        self._last_trigger = -_BETWEEN_TRIGGERS
        self._postponed = False
        self._simulated = self._failures = 0
        self._price = 0.0  # seconds of the last shadow
        self._ablated = -every  # the step of the last search
        self._pending: tuple[Shadow, dict[str, Any] | None] | None = None
        self._versions: list[int] = []
        self._blamed: list[tuple[str, str]] = []
        self._ring = Ring(replay) if replay else None
        self._losses: deque[tuple[int, float]] = deque(maxlen=RECENT)
        self._found_nonfinite = self._event = self._wrong = False
        self._replayed = -_BETWEEN_REPLAYS
        self._refused: set[str] = set()
        self._trace: Trace | None = None
        self._traced: Trace | None = None
        self._converts: str | None = None
        self._elsewhere = self._met = False
        self._twin: OptimizerTwin | None = None
        self._twins = 0
        self._strays: list[Trace] = []
        self._in_graph: dict[str, Any] | None = None
        self._reasoned = not early  # it takes as long as several steps, which nobody has paid for
        self._started = time.perf_counter()
        self.seconds = 0.0
        """Time that experiments took."""

    def begin(self, step: int) -> None:
        """A step begins: captures it if it is one to experiment with."""
        self.drop()
        self._step, self._in_graph = step, None
        if self._ring is not None:
            self._between(step, self._ring)
        self._why = self._reason(step)
        measured = step - self._first <= self._measured and _alone()
        if (self._why or measured or self._ring is not None) and (roots := self._models(step)):
            self._recorder = Recorder(roots, self._guard)
        if self._every and (self._why or step <= self._begun + _TRACED) and not has_compiled():
            recorder = self._recorder
            inside = (lambda: recorder.in_forward) if recorder else lambda: False
            self._trace = Trace(inside, self._traced).enter()
        self._traced = None

    @property
    def captures(self) -> bool:
        """Whether the running step is captured, or a twin of an optimizer goes along."""
        return self._recorder is not None or self._twin is not None or self._wants_twin

    def backward(self, root: Tensor, loss: Tensor, gradient: Tensor | None, retain: bool) -> None:
        """A backward of the training begins."""
        if self._recorder is not None:
            self._recorder.backward(root, loss, gradient, retain)
        # to read a loss costs nothing on a CPU only; after this backward the weights are NaN and the graph is gone
        ask = bool(self._every) and not (self._why or self._found_nonfinite) and root.device.type == "cpu"
        if not ask or loss.isfinite().all():
            return
        with self._safely("nonfinite"), nothing_changes(()):
            self._in_graph = nan_in_graph(root, self._name_of)
        if self._recorder is not None and _alone():  # it can be repeated before its optimizer steps
            self._why, self._last_trigger = "trigger: nonfinite", self._step
        else:
            self._tell_nonfinite(self._step, self._in_graph)

    def learned(self) -> None:
        """A model was met: its first forward begins."""
        if self._trace is not None and not self._met:
            self._met = True
            self._trace.more()

    def backward_ended(self) -> None:
        """A backward of the training has ended."""
        if self._trace is not None and self._trace.active:
            named = ((self._name_of(p), p) for root in self._roots() for p in root.parameters())
            self._trace.gradients(named)

    def renewed(self) -> None:
        """An optimizer made its first step: another phase of the training may begin, as behind a pretraining."""
        if self._step > self._begun + _TRACED and self._phases < _PHASES:
            self._begun, self._phases = self._step, self._phases + 1

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
        if self._trace is not None:
            self._trace.active = False
        try:
            yield
        finally:
            if self._trace is not None:
                self._trace.active = True

    def _look_away(self) -> None:
        """Ends the trace, which goes from one optimizer step to the next, and writes it."""
        if self._trace is not None:
            began = time.perf_counter()
            trace, self._trace = self._trace, None
            trace.close()
            self._strays += [trace] if trace.stray else []
            self._converts = self._converts or trace.model
            # what the first step converts may be the loading of weights
            if trace.outside is not None and self._step > self._first + _TRACED:
                self._convert(trace.outside)
            if (facts := trace.safely(trace.facts, self._name_of_module)) is not None:
                self._keep(self._step, facts)
            if stored := trace.safely(trace.kept):
                self._write(self._step, "stored", sites=stored)
            if trace.failed:
                self._refuse("trace", trace.failed)
            self._traced = trace
            self.seconds += time.perf_counter() - began

    def _convert(self, where: str) -> None:
        """The script converts where no replay comes."""
        if not self._elsewhere:
            self._elsewhere = True
            self._write(self._step, "conversion", where=where)

    def drop(self) -> None:
        """Forgets what was captured."""
        self._look_away()
        for stray in self._strays:  # of another thread, if this is the one
            stray.leave()
        self._strays = [stray for stray in self._strays if stray.stray]
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
        if self._pending is not None:  # its optimizer never finished the step
            (_, facts), self._pending = self._pending, None
            if facts is not None:
                self._write(self._step, "shadow", **facts, loss_after=None)

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step: runs the experiments."""
        if self._every:
            with self._safely("optimizer"):
                self._follow(optimizer)
        if self._recorder is None:
            return None
        recorder, self._recorder = self._recorder, None
        program = recorder.finish()
        began = time.perf_counter()
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not program.forwards or not any(id(p) in held for m in program.modules for p in m.parameters()):
            return self._refuse("shadow", "no forward of the watched model was seen in the step") if self._why else None
        if self._why:
            with self._safely("shadow"):
                self._experiment(program)
            self._price = time.perf_counter() - began
        elif self._step - self._first <= self._measured:
            try:
                self._pending = (self._shadow(program), None)
            except NotReplayableError:  # the first shadow says why
                self._measured = 0
        if self._ring is not None:
            with self._safely("replay"):
                self._ring.note(self._step, program, optimizer)
        self.seconds += time.perf_counter() - began
        return None

    @property
    def _wants_twin(self) -> bool:
        return self._elsewhere and self._twins < self._most_twins

    def _follow(self, optimizer: Optimizer) -> None:
        """Lets a twin go along with an optimizer that a conversion outside of the model may hurt."""
        began = time.perf_counter()
        if self._why and keeps_codes(optimizer):
            self._convert(f"the state of {type(optimizer).__name__}")
        twin, self._twin = self._twin, None  # one that fails goes no further
        wanted = self._wants_twin or (self._why and self._twins < self._most_twins and narrow(optimizer))
        # a step of another optimizer may talk to other ranks, which do not repeat it
        if twin is None and wanted and (_alone() or type(optimizer).__module__.startswith("torch.optim")):
            self._twins += 1
            twin = OptimizerTwin(optimizer)
        if twin is not None and twin.follows(optimizer) and twin.steps == STEPS:
            facts = {"from": self._step - STEPS, "error": twin.error(), "converts": self._elsewhere}
            self._write(self._step, "optimizer", **facts)
        elif twin is not None:
            if twin.follows(optimizer):
                twin.step()
            self._twin = twin
        self.seconds += time.perf_counter() - began

    @contextmanager
    def _safely(self, what: str) -> Iterator[None]:
        """A training must not end because an experiment fails."""
        try:
            with self._quiet(), self._unseen():
                yield
        except NotReplayableError as error:
            self._refuse(what, str(error))
        except (Exception, SystemExit) as error:  # a script that counts its forwards may leave in one
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
        found: dict[str, Any] = {"loss_after": None, "loss_tenth": None}
        touched = facts is not None and self._versions != [p._version for p in shadow.parameters]
        if shadow.tail:
            began = time.perf_counter()
            try:
                with self._quiet(), self._unseen(), nothing_changes(shadow.program.modules):
                    before = shadow.loss if facts is None else facts["loss"]
                    found["loss_after"] = after = shadow.loss_now()
                    if facts is not None and after is not None and after <= before:
                        with shadow.scaled(_LONGER):
                            found |= {"longer": _LONGER, "loss_longer": shadow.loss_now()}
                    elif after is not None and after > before:
                        with shadow.scaled(0.1):
                            found["loss_tenth"] = shadow.loss_now()
                        if facts is None:
                            with shadow.scaled(0.001):  # of a step a hundred times too long a tenth is too long
                                found["loss_thousandth"] = shadow.loss_now()
                            if any(overshoots({"loss": before, **found}, part) for part in ("tenth", "thousandth")):
                                facts = self._again(shadow)
            except Exception:  # a tensor of the loss, such as a tied head, was stepped: the batch cannot be repeated
                _LOG.debug("watch: the step's own batch was not repeated", exc_info=True)
            self.seconds += time.perf_counter() - began
        if facts is not None:
            self._write(self._step, "shadow", **facts, **found, touched=touched)

    def _again(self, shadow: Shadow) -> dict[str, Any] | None:
        """What the casts do in a step that made its own batch worse, from the weights that it began with."""
        facts = {"why": OVERSHOOTS, "loss": shadow.loss}
        with shadow.scaled(0.0):
            if shadow.loss_now() != shadow.loss:
                return None  # another step than that of the run
            real = shadow.script or (shadow.casts is not None and shadow.casts.mode == "real")
            return {**((shadow.facts(self._name_of) if real else None) or {}), **facts}

    # --- which steps ----------------------------------------------------------------------------------------------

    def _reason(self, step: int) -> str:
        """Why this step is captured; "" if it is not."""
        if not self._every or self._failures >= _GIVE_UP:
            return ""
        if self._asked and step - self._last_trigger >= _BETWEEN_TRIGGERS:
            self._last_trigger, why, self._asked = step, self._asked, ""
            return why if _alone() or self._no_collectives(step) else ""
        number = step - self._first
        due = number in self._early or number % self._every == 0
        if not (due or self._postponed):
            return ""
        spent = self.seconds / max(time.perf_counter() - self._started, 1e-9)
        free = number in self._early and (number <= _UNPAID or self._price <= _CHEAP)
        broke = not free and spent > self._share
        self._postponed = _alone() and broke  # ranks must agree, clocks do not
        return "" if self._postponed else "schedule"

    def _models(self, step: int) -> list[nn.Module]:
        models = []
        for root in self._roots():
            if type(root).__name__ in _REFUSED:
                self._refuse("shadow", f"{type(root).__name__} shards or copies the model by itself", step)
                return []
            if isinstance(root, torch.jit.ScriptModule):
                self._refuse("shadow", "TorchScript takes no hooks", step)
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
            self._tell_nonfinite(self._step, found or self._in_graph)  # a loss may have parts that are not repeated
            if found is None and not all(bool(p.isfinite().all()) for p in parameters):
                self._refuse(
                    "nonfinite",
                    "the weights were not finite any more in the first step that could be repeated; a watch with "
                    "replay=20 keeps the steps before",
                )
        shadow = self._shadow(program)
        casts, script = shadow.casts, shadow.script
        if nothing := casts is None and not script:
            self._refuse("shadow", "the model has no layer that casts, and no linear layer to simulate casts in")
        elif casts is not None and casts.mode == "simulated" and not script:
            nothing = self._simulated >= _SIMULATED
            self._simulated += 1
        logic: dict[str, bool | None] = {}
        if not self._reasoned:
            self._reasoned = True
            with self._safely("logic"), nothing_changes(program.modules):
                # one scale for a tensor lets every element depend on every other one
                plain = with_sites(casts, ()).without if script or not casts else casts.without
                logic = reasons(program.forwards, plain, ranks=not _alone())
        self._versions = [p._version for p in parameters]
        if nothing:  # the step itself is tried all the same
            tried: dict[str, Any] = {"why": self._why, "loss": shadow.loss, **logic}
            if self._elsewhere or (self._trace is not None and self._trace.outside is not None):
                with nothing_changes(program.modules):
                    tried |= shadow.passed()  # a conversion behind the backward is one of its gradient
            self._pending = (shadow, tried)
            return
        with nothing_changes(program.modules):
            began = time.perf_counter()
            facts = shadow.facts(self._name_of)
            took = time.perf_counter() - began
            if (where := self._where) is not None and not shadow.sites:
                self._convert(where)  # a hook of a communication, an accumulation: no part of a replay
            if facts is None or shadow.casts is None:
                return
            casts = shadow.casts
            self._pending = (shadow, {"why": self._why, **facts, **logic})
            if casts.mode == "real" and self._ablates(facts, casts, took):
                search = Ablation(shadow.player, casts, shadow.exact, facts["error"], tail=shadow.tail)
                if (found := search.facts()) is not None:
                    self._ablated = self._step
                    self._blamed = [(entry.get("layer") or entry["site"], entry["gemm"]) for entry in found["set"]]
                    self._write(self._step, "ablation", **found)

    @property
    def _where(self) -> str | None:
        """Where the script converts in the model."""
        return self._converts or (self._trace.model if self._trace is not None else None)

    def _shadow(self, program: Program) -> Shadow:
        casts = casts_of(program.modules, self._name_of_module, self._recipe)
        script = self._where is not None or any(f.around.saved is not None for f in program.forwards)
        return Shadow(program, casts, parameters_of(program.modules), script=script)

    def _tell_nonfinite(self, step: int, found: dict[str, Any] | None) -> None:
        if found is not None and not self._found_nonfinite:
            self._found_nonfinite = True
            self._write(step, "nonfinite", **found)

    def _ablates(self, facts: Mapping[str, Any], casts: Casts, took: float) -> bool:
        """Whether to search for the worst of casts that hurt: not too soon, nor, with a budget, too dear."""
        if facts["error"] is None or self._step - self._ablated < self._every:
            return False
        about = (facts["error"], facts.get("noise"), facts.get("bias"), casts.bits)
        if not gradient_hurts(*about, hidden=SUSPICIOUS):
            return False
        # what may be noise is searched for once it is paid for; ranks must agree, clocks do not
        if (gradient_hurts(*about) and self._early == EARLY) or self._why != "schedule" or not _alone():
            return True
        return self.seconds + _SEARCH * took < self._share * (time.perf_counter() - self._started)


def _alone() -> bool:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not distributed or torch.distributed.get_world_size() == 1
