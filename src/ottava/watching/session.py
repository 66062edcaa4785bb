"""`watch`: one watched run from its first step to its end.

A step ends with the step of torch's optimizer, so the training code needs no change. The watch then records the step,
checks the triggers, and attaches or removes hooks for the next step. A step without a look has no hooks, or only the
hooks that note amaxes. A watch takes part in no collective: every rank writes its own files.

Between looks the watch never waits for a GPU. It copies loss and amaxes to the host and reads them when they have
arrived, perhaps steps later, under the number of their own step (`Ended`). On a CPU they arrive at once.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import math
import os
import random
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ottava.base.errors import need
from ottava.base.settings import ConfigError
from ottava.experiments.snapshot import calls_on
from ottava.measure.layer_names import matches
from ottava.measure.tally import Tallies, Tally
from ottava.record.reader import Run, Table
from ottava.record.schema import FAILED, MANIFEST, RunError, SlotKey
from ottava.record.writer import RunWriter
from ottava.watching.checks import Checks
from ottava.watching.collector import Collector, DumpPlan
from ottava.watching.config import EVERY, WatchConfig
from ottava.watching.doors import DoorTap, Interventions
from ottava.watching.loss import LossTap, Share, of_step
from ottava.watching.manifest import coverage, start_of_run
from ottava.watching.modules import ModuleTap
from ottava.watching.operands import Hook, unseen_by_modes
from ottava.watching.readback import Amaxes, Ended, Reading
from ottava.watching.schedule import Jumps, Schedule, Spent, Trigger
from ottava.watching.sinks import make_sinks, publish
from ottava.watching.training import UPDATES, TrainingTap

if TYPE_CHECKING:
    from ottava.experiments.laboratory import Laboratory
    from ottava.remedy.cure import Cures

_LOG = logging.getLogger(__name__)
_FLUSH_SECONDS = 5.0
"""Looks wait in memory for so long, because writing a file takes as long as a look at a small model."""
_MOST_STEPS = 1 << 53
"""What a float counts without a gap: steps are such numbers in charts and tables."""
_RECHECK = 32
"""Steps after which a watch with a budget asks again what its light steps cost; first after 4, 8 and 16."""


def watch(
    model: nn.Module | None = None,
    folder: Path | str | None = None,
    config: WatchConfig | Mapping[str, Any] | Path | str | None = None,
    *,
    step: int | None = None,
    append: bool = False,
    **settings: Any,
) -> Watch:
    """Watches the casts of a training run and writes them to a folder; see `Watch`.

    Args:
        model: the model to watch; None: every layer of the process, also those made later.
        folder: the run folder; None: runs/watch-DATE-TIME.
        config: a WatchConfig, a mapping of settings, or a YAML file.
        step: optimizer steps done so far, for a resumed run; the record of later ones is removed. None: 0, and with
            `append` the last step of the record.
        append: go on in a folder that already has a watched run.
        settings: fields of WatchConfig; they override `config`.
    Raises:
        ConfigError: a setting is unknown or wrong, or a layer pattern matches nothing.
        RunError: the folder already has a run.
    Edge cases: works on any torch model. Layers converted by ottava show the operands of their GEMMs; for other layers
        the watch simulates the casts of `recipes` beside the GEMM. Training keeps every bit.

    Example:
        >>> import tempfile, ottava
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with tempfile.TemporaryDirectory() as folder, watch(model, f"{folder}/run", recipes="blockwise") as seen:
        ...     for _ in range(2):
        ...         model(torch.randn(8, 64)).square().mean().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...     seen.flush()
        ...     table = ottava.debug.Run.open(seen.folder).table()
        >>> len(table.slots()), set(table["step"].tolist())
        (10, {1, 2})
    """
    if isinstance(folder, str) and not folder.strip():
        raise ConfigError(f"watch: folder is {folder!r}; needs a path, or None for runs/watch-DATE-TIME")
    path = Path(folder) if folder is not None else Path("runs") / f"watch-{datetime.now():%Y%m%d-%H%M%S}"
    if model is not None:
        need("watch", model, nn.Module, "a torch.nn.Module, or None for every layer of the process")
    if step is None:
        step = int(Run.open(path).steps["step"].max(initial=0)) if append and (path / MANIFEST).is_file() else 0
    if not 0 <= step < _MOST_STEPS:
        raise ConfigError(f"watch: step is {step}; needs the optimizer steps done so far, 0 to {_MOST_STEPS - 1:,}")
    drawn = random.getstate()
    try:
        return Watch(model, path, WatchConfig.load(config, **settings), step=step, append=append)
    finally:
        random.setstate(drawn)  # rich draws a number when it is imported


class Watch:
    """A watched run; made by `watch`. Use it as a context, or call `close` at the end.

    Args:
        model, folder, config, step, append: as for `watch`.
        read: brings a step's numbers to the host.
    """

    OWN: tuple[type[Exception], ...] = (
        *(RuntimeError, TypeError, LookupError, AttributeError, ArithmeticError, ValueError, Warning),
    )
    """Errors in a hook that end the watch alone. Others are meant: a setting that fits nothing, a full disk."""
    _failed = ""
    """The watch's own error, which has ended it."""
    _theirs: Exception | None = None
    """An error of a callback, which the training is to see."""
    _home: int | None = None
    """The thread that trains."""
    _crowded = False

    def __init__(
        self,
        model: nn.Module | None,
        folder: Path,
        config: WatchConfig,
        *,
        step: int = 0,
        append: bool = False,
        read: Callable[[Sequence[Tensor]], Reading] = Reading,
    ) -> None:
        self.folder, self.config, self.steps_done = folder, config, step
        self._model = None if model is None else weakref.ref(model)
        self.rank = int(os.environ.get("RANK", "0"))
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.rank = torch.distributed.get_rank()
        if model is not None:
            names = [name for name, module in model.named_modules() if module._parameters]
            shapes = {name: () if is_lazy(p) else p.shape for name, p in model.named_parameters()}
            for name, shape in shapes.items():  # each expert is a layer
                names += [name, *(f"{name}.{i}" for i in range(shape[0] if len(shape) == 3 else 0))]
            self._check_patterns(names)
        self.writer = RunWriter(folder, rank=self.rank, append=append, step=step, patient=True)
        self.writer.describe(**start_of_run(int(os.environ.get("WORLD_SIZE", "1"))), settings=config.to_dict())
        self._weights: dict[str, str] = self.writer.manifest.get("weights") or {}  # those before the first step
        if append and step > 0:
            self.writer.event(step, "resumed")
        self.schedule = Schedule(config.every or EVERY, config.triggers, config.looks)
        self.jumps = Jumps()
        self.dumps = DumpPlan(config.dump, self.writer)
        self.collector = Collector(config, self.dumps, lambda layer: self.modules.recipe_of(layer))
        self.changes = Interventions(config.interventions, self._warn)
        checks = Checks(lambda facts: self.writer.event(self.steps_done + 1, "check", **facts))
        self.doors = DoorTap(self.collector, model, checks, self.changes.apply, self._outlived)
        self.modules = ModuleTap(
            self.collector.simulate,
            tensors=config.tensors,
            model=model,
            wants=self.collector.wants,
            asked=lambda layer: matches(layer, config.layers),
            learned=self._learned,
            guard=self._outlived,
        )
        told: dict[str, Any] = {"report": self._reports, "by_hand": self._end_step, "guard": self._outlived}
        self.training = TrainingTap(model, batches=config.batches, **told)
        self.laboratory = self._make_laboratory(step)
        self.spent = Spent(lambda: self.laboratory.seconds)
        """What the watch takes of the host's time."""
        seen = self._saw_loss, self._rooted, self._backward_ended, self.laboratory.backward
        self.losses = LossTap(*seen, guard=self._outlived)
        self.sinks = make_sinks(list(config.sinks), folder) if self.rank == 0 else []
        self._read = read
        self._ended: deque[Ended] = deque()
        self._flight: deque[Amaxes] = deque(maxlen=config.flight)
        self._loss_parts: list[Tensor] = []
        self._logged: dict[str, float] = {}
        self._active = self._paused = self._held = self._idle = False
        self._stepped: set[int] = set()
        self._callbacks: list[Callable[[int, Table], object]] = []
        self._looks = 0
        self._look_seconds = 0.0  # the last look
        self.last_look: tuple[int, Mapping[SlotKey, Tally]] = (0, {})
        """Its step and its statistics."""
        self._nothing: Tallies[SlotKey] = Tallies.of({})
        self._started = self._step_started = self._mark = self._flushed = time.perf_counter()
        self._light_every = 1
        self._light_seconds = self._seconds_before = 0.0
        if append and step > 0 and (folder / MANIFEST).is_file():  # rank 0 writes it
            self._resume(Run.open(folder))
        self._stance: Any = None
        self._closed = False
        self._hooks = [
            register_optimizer_step_pre_hook(self._outlived(self._before_optimizer, closes=True)),
            register_optimizer_step_post_hook(self._outlived(self._after_optimizer, closes=True)),
        ]
        self.cures = self._make_cures() if config.cure is not None else None
        self.losses.attach()
        atexit.register(self._at_exit)
        for note in config.notes:
            self._warn(note)
        self._arm(step + 1)

    def _make_laboratory(self, step: int) -> Laboratory:
        from ottava.experiments.laboratory import Laboratory  # it brings every layer: only a running watch needs it

        return Laboratory(
            self._models,
            every=self.config.shadow,
            replay=self.config.replay,
            recipe=self.config.recipes[0],
            write=self.writer.experiment,
            keep=self.writer.trace,
            name_of=self.modules.names.parameter,
            name_of_module=lambda module: self.modules.names.of(module) or type(module).__name__,
            quiet=self._quiet,
            step=step,
            share=self.config.max_overhead,
            early=self.config.early,
            guard=self._outlived,
        )

    def _make_cures(self) -> Cures:
        from ottava.remedy.cure import Cures

        assert self.config.cure is not None
        return Cures(self.config.cure.model_dump(), lambda: [*self._models()])

    def log(self, **numbers: float) -> None:
        """Adds numbers to the line of the running step: loss, grad_norm, lr, tokens, or any other name. Without a loss
        here, the watch averages over micro-batches the loss on which backward() was called."""
        self._logged |= {name: float(value) for name, value in numbers.items()}

    def describe(self, **facts: Any) -> None:
        """Adds facts to the manifest. `compare` shows how config={...} differs between two runs."""
        self.writer.describe(**facts)

    def step(self) -> None:
        """Ends a step. Without an optimizer of torch's, a step ends with the next forward if weights have changed."""
        self._outlived(self._end_step, closes=True)()

    def on_look(self, callback: Callable[[int, Table], object]) -> None:
        """Calls the callback, such as a `Fallback`, with the step and its statistics after every full look."""
        self._callbacks.append(callback)

    def want_norm(self) -> None:
        """Asks for the gradient norm of the running step, which a watch with a budget may have left out."""
        self.training.norm_wanted = True

    def recent(self) -> Run:
        """The last 256 steps that have arrived, as many events and experiments, and the last look: from memory."""
        return Run.of(self.folder, self.writer.manifest, self.writer.recent, Table.of(*self.last_look))

    def rewind(self, step: int) -> None:
        """Goes back to the end of an earlier step, as the training did, and deletes the record of later steps."""
        self._settle(wait=True)
        self.writer.rewind(step)
        self.laboratory.forget()
        self._disarm()
        self.collector.drain()
        self.training.drain()
        self.steps_done, self._active, self._loss_parts, self._logged = step, False, [], {}
        self._arm(step + 1)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops watching inside the context: no hooks, and no step ends."""
        self._disarm()
        self.losses.detach()
        self.laboratory.drop()
        self._paused = self.training.paused = True
        try:
            yield
        finally:
            self._paused = self.training.paused = False
            if not self._closed:
                self.losses.attach()
                self._arm(self.steps_done + 1)

    def flush(self) -> None:
        """Writes everything to disk; waits for numbers that have not arrived from a device."""
        if not self._closed:
            self._settle(wait=True)
            self._write()

    def close(self, ended: str = "closed") -> None:
        """Removes every hook and writes the rest. `ended` says why the run ended."""
        if self._closed:
            return
        try:
            self._close(ended)
        except self.OWN as error:
            if error is self._theirs:
                raise
            self._fail(error)
            self._let_go()

    def _close(self, ended: str) -> None:
        self.training.wrote()
        self._closed, unfinished = True, self._unfinished()
        atexit.unregister(self._at_exit)
        for hook in self._hooks:
            hook.remove()
        if self.cures is not None:
            self.cures.close()
        self.training.close()
        self.laboratory.drop()
        self.losses.detach()
        self._disarm()
        self.changes.undo()
        self._settle(wait=True)
        if unfinished is not None:
            what, loss = unfinished
            if loss is not None:
                self.laboratory.backward(loss, loss, None, False)
            self.writer.step(self.steps_done + 1, loss=math.nan)
            self.writer.describe(unfinished={"step": self.steps_done + 1, "what": what})
        self._describe_run(final=True)
        self.writer.describe(ended=f"{FAILED}{self._failed}" if self._failed else ended)
        self.writer.close()
        for sink in self.sinks:
            sink.close()

    def _unfinished(self) -> tuple[str, Tensor | None] | None:
        """What is not finite of a step that has no backward, as a loop makes it that stops there; the loss, if the
        script still has it."""
        with contextlib.suppress(RuntimeError):  # of a device that has failed
            if self.training.outputs:
                scalars = (
                    x for x in gc.get_objects() if type(x) is Tensor and x.grad_fn is not None and x.numel() == 1
                )
                if (loss := next((x for x in scalars if not bool(x.isfinite())), None)) is not None:
                    return "loss", loss
            if any(bool(x.isnan().any()) for x in self.training.outputs):
                return "output of the model", None
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._end(error)

    def _at_exit(self) -> None:
        """Closes the watch if the process ends without `close`."""
        self._end(getattr(sys, "last_value", None))

    def _end(self, error: BaseException | None) -> None:
        if error is None or self._closed:
            return self.close()
        self._settle(wait=True)
        self._keep_flight(why := f"{type(error).__name__}: {error}".removesuffix(": "))
        return self.close(why)

    @property
    def overhead(self) -> float:
        """Share of the host's time since the start that watching took."""
        return self.spent.seconds / max(time.perf_counter() - self._started, 1e-9)

    # --- calls from the taps --------------------------------------------------------------------------------------

    def _outlived(self, hook: Callable[..., Any], closes: bool = False) -> Callable[..., Any]:
        """The hook; an error that nobody raised on purpose ends the watch, and the training goes on.

        closes: whether hooks may be removed while it runs; a forward would miss them.
        """

        def run(*given: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling():  # first: Dynamo traces what a forward or a compiled step calls
                return None
            if torch._C._get_tracing_state() is not None:  # torch.jit.trace would repeat it
                return None
            try:
                if not self._failed and self._at_home(given, closes):
                    with self.spent, unseen_by_modes():
                        return hook(*given, **named)
            except self.OWN as error:
                if error is self._theirs or isinstance(error, (ConfigError, RunError)):
                    raise
                self._fail(error)
            if closes and self._failed:
                self.close()
            return None

        return Hook(run)

    def _at_home(self, given: Sequence[Any], steps: bool) -> bool:
        """Whether this is the thread that trains, or one of a backward.

        It is the first in which the given model ran, or, without one, an optimizer stepped.

        given: what a hook was called with: (module or optimizer, ...).
        """
        mine = threading.get_ident()
        if self._home == mine or torch._C._current_graph_task_id() != -1:
            return True
        if self._home is not None and any(thread.ident == self._home for thread in threading.enumerate()):
            if steps and not self._crowded:
                self._crowded = True
                self._warn("another thread trains, too; the watch follows the one that began first")
            return False
        begins = steps if self._model is None else bool(given) and given[0] is self._model()
        self._home = mine if begins else None  # None: it has yet to begin, or has ended
        return True

    def _fail(self, error: Exception) -> None:
        at, step = traceback.extract_tb(error.__traceback__)[-1], self.steps_done + 1
        self._failed = f"{type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})"
        self._warn(f"an error of the watch's own ended it in step {step}, and the training goes on: {self._failed}")

    def _let_go(self) -> None:
        """Holds on to nothing, whatever else is broken."""
        hooks = [one.remove for one in self._hooks]
        taps = self.training.close, self.laboratory.drop, self.losses.detach, self._disarm
        written = lambda: self.writer.describe(ended=f"{FAILED}{self._failed}"), self.writer.close
        for undo in (*hooks, *taps, *written):
            with contextlib.suppress(*self.OWN):
                undo()

    def _warn(self, text: str) -> None:
        _LOG.warning("watch: %s", text)
        self.writer.event(self.steps_done, "warning", text=text)

    def _saw_loss(self, loss: Tensor, share: Share) -> None:
        self._active = True
        self._loss_parts.append(loss.detach().to(torch.float32))
        known = (
            share
            if isinstance(share, Tensor)
            else torch.tensor(math.nan if share is None else share, dtype=torch.float32)
        )
        self._loss_parts.append(known.detach().to(torch.float32))

    def _learned(self) -> None:
        for known in self.modules.names.roots():
            self.training.adopt(known)
        self.laboratory.learned()

    def _rooted(self, roots: Sequence[Tensor]) -> None:
        self.training.rooted(roots)
        for root in roots:
            self.modules.look_back(root)

    def _backward_ended(self, scale: Tensor | None) -> None:
        self.training.backward_ended(scale)
        self.laboratory.backward_ended()

    def _models(self) -> list[nn.Module]:
        model = None if self._model is None else self._model()
        return [model] if model is not None else [*self.modules.names.roots()]

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Sees nothing inside the context, in the middle of a step."""
        attached, paused = self.doors.attached, self._paused
        self._disarm()
        self.losses.detach()
        self._paused = self.training.paused = True
        try:
            yield
        finally:
            if not self._closed:  # the last look at a loop that stopped is made while the watch ends
                self.losses.attach()
            self._paused = self.training.paused = paused
            if attached:
                self.doors.attach()
                self.modules.attach()

    def _reports(self, kind: str, **facts: Any) -> None:
        self.writer.training(self.steps_done + 1, kind, **facts)

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        if calls_on(optimizer):
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            return self._about_to_step(optimizer)
        self.training.searches = True
        about_to_step = self._outlived(self._about_to_step)
        waits = [optimizer]  # the closure makes the gradients, as Lightning's does; a second call is another search

        def closed(*given: Any, **named: Any) -> Any:
            result = closure(*given, **named)
            if waits:
                about_to_step(waits.pop())
            return result

        return (args[0], closed, *args[2:]), {name: x for name, x in kwargs.items() if name != "closure"}

    def _about_to_step(self, optimizer: Optimizer) -> None:
        if self.cures is not None:
            self.cures.before(optimizer)
        if self._paused or (self._idle and not self.laboratory.captures) or not self._is_ours(optimizer):
            return
        self.training.before(optimizer)
        self.laboratory.before_step(optimizer)

    def _after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if calls_on(optimizer):
            return
        if self.cures is not None:
            self.cures.after(optimizer)
        self.training.searches = False
        if self._paused or not self._is_ours(optimizer):
            return
        if not self.training.knows(optimizer):
            self.laboratory.renewed()
        self.training.after(optimizer, self.modules.names.parameter)
        self.laboratory.after_step()
        if self._ends_step(optimizer):
            self._stepped.clear()
            self._end_step()
        self._stepped.add(id(optimizer))

    def _ends_step(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer ends the step: of several that step after one backward, the first does."""
        if self._active:
            return True
        # no loss: a stage of a pipeline gets gradients from the next stage
        again = id(optimizer) in self._stepped
        if (self.collector.looking or self.collector.noting) and self.training.derives:
            return self.collector.holds
        return again or self.collector.holds

    def _is_ours(self, optimizer: Optimizer) -> bool:
        if self._model is None or (model := self._model()) is None:
            return self._model is None
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if any(id(p) in stepped for p in model.parameters()):
            self._held = True
            return True
        return not self._held and self.training.stands_in(optimizer)

    def _resume(self, run: Run) -> None:
        """Restores schedule and thrift from the resumed run; only rank 0 recorded losses."""
        mine = [e for e in run.events if e.get("rank", 0) == self.rank and e["step"] <= self.steps_done]
        losses = run.steps["loss"][run.steps["step"] <= self.steps_done].tolist() if self.rank == 0 else []
        self.schedule.resume(mine, losses)
        full = run.table(merge_ranks=False).where(rank=self.rank)["step"]
        self._looks = len({int(step) for step in full if step <= self.steps_done})  # the next look takes the next rows
        slowed = [event for event in mine if event.get("kind") == "overhead"]
        if slowed and self.config.every is None:
            self.schedule.every, self._light_every = slowed[-1]["every"], slowed[-1]["light_every"]

    # --- the end of a step ----------------------------------------------------------------------------------------

    def _end_step(self) -> None:
        entered = self.spent.now()
        self._active = False
        self.steps_done += 1
        step = self.steps_done
        looked = self.collector.looking
        self._disarm()
        if self._idle:
            self._end_idle_step(entered)
            return
        if (looked or self.collector.noting) and (text := self.modules.looked()) is not None:
            self.writer.event(step, "warning", text=text)
        tallies, light = self.collector.drain()
        self.dumps.looked(tallies)
        training = self.training.drain()
        reading = self._read([light.amax, light.scale_inv, *training.numbers.values(), *self._loss_parts])
        numbers = {"seconds": entered - self._step_started} | self._logged
        self._loss_parts, self._logged = [], {}
        self._ended.append(Ended(step, numbers, tallies, light.keys, reading, looked, training))
        self._settle(wait=looked)  # after a look everything has arrived, because the tallies were waited for
        self._arm(step + 1)
        before, self._seconds_before = self._seconds_before, self.spent.seconds
        if looked:
            self._look_seconds = self._seconds_before - before
        else:
            self._light_seconds += self._seconds_before - before
        self._step_started = self.spent.now()

    def _end_idle_step(self, entered: float) -> None:
        """Keeps the loss of a step that is not looked at."""
        facts = self.training.skip()
        numbers = {"seconds": entered - self._step_started} | self._logged
        reading = self._read(
            [none := torch.zeros(0, dtype=torch.float32), none, *facts.numbers.values(), *self._loss_parts]
        )
        self._loss_parts, self._logged = [], {}
        self._ended.append(Ended(self.steps_done, numbers, self._nothing, (), reading, False, facts))
        self._settle(wait=False)
        self._arm(self.steps_done + 1)
        self._step_started = self.spent.now()
        self._seconds_before = self.spent.seconds

    def _settle(self, *, wait: bool) -> None:
        """Records ended steps in order, as far as their numbers have arrived; all of them if `wait`."""
        while self._ended and (wait or self._ended[0].reading.ready()):
            ended = self._ended.popleft()
            try:
                amax, scale_inv, *losses = ended.reading.values()
            except RuntimeError as error:  # the device failed: the user must see the error of the training, not ours
                text = f"the device failed before loss and amaxes arrived: {error}"
                self.writer.event(ended.step, "warning", text=text)
                self.writer.step(ended.step, **ended.training.host | ended.numbers)
                continue
            training = self._saw_training(ended, losses)
            parts = [part for (part,) in losses[len(ended.training.numbers) :]]
            loss = {"loss": of_step(parts[::2], parts[1::2], self.config.loss)} if parts else {}
            if len(parts) > 2 and math.isfinite(share := math.fsum(parts[1::2])):
                loss["loss_share"] = share
            numbers = training | loss | ended.numbers
            self.writer.step(ended.step, ended.tallies is self._nothing, **numbers)
            self.writer.tallies(ended.step, ended.tallies)
            if ended.keys:
                self._flight.append(Amaxes(ended.step, ended.keys, amax, scale_inv))
            self._ask_triggers(ended, numbers.get("loss"), amax)
            if ended.looked:
                self._looks += 1
                self._after_look(ended.step, ended.tallies, numbers)
            asks = ended.looked or (self._budgeted and (ended.step in (4, 8, 16) or not ended.step % _RECHECK))
            if self.config.every is None and asks:
                self._be_thrifty(ended.step, self.config.max_overhead)

    def _saw_training(self, ended: Ended, values: Sequence[Sequence[float]]) -> dict[str, float]:
        """Records the updates of a look; the numbers of the step."""
        names_read, updates = list(ended.training.numbers), ended.training.updates
        if updates is not None:
            flat, names = values[names_read.index("updates")], updates.names
            columns = zip(UPDATES, range(0, len(flat), len(names)), strict=True)
            facts = {name: [float(f"{v:.4g}") for v in flat[i : i + len(names)]] for name, i in columns}
            self.writer.training(ended.step, "updates", parameters=list(names), **facts)
        return self.training.finish(ended.training.host, names_read, values[: len(names_read)])

    def _ask_triggers(self, ended: Ended, loss: float | None, amax: Sequence[float]) -> None:
        self.laboratory.lost(ended.step, loss)
        answers: list[Trigger | None] = [] if loss is None else [self.schedule.loss(loss)]
        answers += self.schedule.tallies(ended.tallies)
        if ended.keys:
            jumps = self.jumps(ended.step, ended.keys, amax)
            for key, before, after in jumps:
                place = {"layer": key.layer, "tensor": key.tensor}
                self.writer.event(ended.step, "jump", **place, before=before, after=after)
            answers += [self.schedule.light(ended.keys, amax), self.schedule.jumped(jumps)]
        triggers = [trigger for trigger in answers if trigger is not None]
        if not triggers or not self.schedule.start_burst(self.steps_done):
            return
        for trigger in triggers:
            self.writer.event(ended.step, "trigger", **trigger.facts())
            self.laboratory.triggered(trigger.reason)
        self._keep_flight(triggers[0].reason)
        self.dumps.triggered()
        self.writer.event(self.steps_done, "burst", until=self.schedule.burst_until)

    def _keep_flight(self, why: str) -> None:
        """Writes the amaxes of the last steps to the run folder."""
        if not self._flight:
            return
        for step, keys, amaxes, scales in self._flight:
            for key, amax, scale_inv in zip(keys, amaxes, scales, strict=True):
                scale = 1 / scale_inv if scale_inv > 0 else None
                scales_of_cast: dict[str, Any] = {} if scale is None else {"scale_max": scale, "scale_min": scale}
                finite = amax if amax < float("inf") else 0.0
                nonfinite = 0.0 if finite == amax else 1.0
                tally = Tally(amax=finite, n_nonfinite=nonfinite, **scales_of_cast)
                self.writer.tally(step, key, tally, phase="light")
        self.writer.event(self.steps_done, "flight", first=self._flight[0].step, last=self._flight[-1].step, why=why)
        self._flight.clear()
        self.writer.flush()

    def _after_look(self, step: int, tallies: Tallies[SlotKey], numbers: Mapping[str, float]) -> None:
        if self._looks == 1:
            others = [layer["name"] for layer in self.modules.coverage() if layer["name"] not in self.doors.layers]
            self._check_patterns(names := [*self.doors.layers, *others])
            if not names:
                self.writer.event(step, "warning", text="the model has no layer with a GEMM")
            self.changes.missed(others)
        self.last_look = step, tallies
        if tallies and (self.sinks or self._callbacks):
            table = Table.of(step, tallies)
            publish(self.sinks, step, table, numbers)
            with self.paused():
                for callback in self._callbacks:
                    try:
                        callback(step, table)
                    except Exception as error:
                        self._theirs = error
                        raise
        if self._looks == 1 or time.perf_counter() - self._flushed > _FLUSH_SECONDS:
            self._write()

    def _write(self) -> None:
        self.writer.flush()
        self._describe_run()
        self._flushed = time.perf_counter()

    @property
    def _budgeted(self) -> bool:
        """Whether steps between light steps are left alone: a watch that may spend nothing before it is paid for."""
        return not (self.config.early or self.config.every is not None or self.config.looks)

    def _be_thrifty(self, step: int, limit: float) -> None:
        """Doubles the distance of light steps if they take a third of the limit, or of looks if watching exceeds it:
        torch calls the hooks, and that is as dear as they are.

        With a budget, light steps come at once as far apart as their cost asks.
        """
        now = time.perf_counter()
        settled = step >= 2 * self.schedule.every and step > self.schedule.burst_until
        excess = self._light_seconds / max(limit / 3 * (now - self._mark), 1e-9)
        if excess > 1 and self._light_every < self.config.flight:
            self._light_every *= 2 ** max(1, math.ceil(math.log2(excess))) if self._budgeted else 2
            self._light_every = min(self._light_every, self.config.flight)
        elif settled and self.overhead > limit:
            self.schedule.every *= 2
        else:
            return
        self._mark, self._light_seconds = now, 0.0
        facts = {"every": self.schedule.every, "light_every": self._light_every}
        self.writer.event(step, "overhead", share=self.overhead, **facts)

    def _paid(self) -> bool:
        """Whether one more look stays in the limit; always if looks may be early, or come at steps that are given."""
        if not self._budgeted or not self._looks:
            return True
        now = time.perf_counter()
        return self.spent.seconds + self._look_seconds <= self.config.max_overhead * (now - self._started)

    def _check_patterns(self, names: Sequence[str]) -> None:
        chosen: tuple[Any, ...] = (*self.config.looks, *self.config.dump.periods, *self.config.interventions)
        for pattern in (*self.config.layers, *(pattern for part in chosen for pattern in part.layers)):
            if not any(matches(name, (pattern,)) for name in names) and (names or pattern != "*"):
                shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
                raise ConfigError(f"watch: the pattern {pattern!r} matches no layer; the layers are: {shown or 'none'}")

    # --- hooks ----------------------------------------------------------------------------------------------------

    def _arm(self, step: int) -> None:
        dumping = self.dumps.begin(step)
        looking = self.schedule.looks(step) and (self.schedule.bursts(step) or self._paid())
        self.collector.looking = looking or dumping
        self.collector.only = None if dumping else self.schedule.only(step)
        self.collector.look = self._looks
        light = step % self._light_every == 0
        self.collector.noting = self.config.light and light
        # the step after a look tells what was written in between
        self._idle = self._budgeted and not (light or self.collector.looking or self.training.expects)
        self.training.looking, self.training.idle = self.collector.looking, self._idle
        self.training.guards = not self._idle or (step + 1) % self._light_every == 0
        # without an optimizer the next model tells of its steps only if it is known
        by_hand = not self.training.optimized
        if self.collector.looking or self.collector.noting or self.changes.config or by_hand:
            self.doors.attach()
            self.modules.attach()
        self.laboratory.begin(step)
        if self.collector.looking and self.config.compiled == "eager":
            self._stance = torch.compiler.set_stance("force_eager")

    def _disarm(self) -> None:
        self.doors.detach()
        self.modules.detach()
        if self._stance is not None:
            self._stance = None
            torch.compiler.set_stance("default")

    def _describe_run(self, final: bool = False) -> None:
        facts = {"looks": self._looks, "steps": self.steps_done}
        overhead = {"watching_s": self.spent.seconds, "total_s": time.perf_counter() - self._started}
        training = self.training.describe(final)
        training["weights"] = self._weights or training["weights"]
        seen = coverage(self.doors, self.modules, trained=self.steps_done > 0)
        if not seen["coverage"]["seen"] and (self.writer.manifest.get("coverage") or {}).get("seen"):
            seen = {}  # a resumed run that has not looked yet knows what it saw before
        self.writer.describe(
            **training,
            **seen,
            overhead={"share": self.overhead, **overhead, **facts},
        )
