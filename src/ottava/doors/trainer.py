"""`OttavaCallback` puts ottava's numbers into the logs of transformers' Trainer and of TRL's, and watches the run.

Numbers travel in the dict of `Trainer.log`, so they arrive wherever the user logs: Weights & Biases, TensorBoard,
trackio, MLflow, the terminal, trainer_state.json. They are what the watch measured and what `diagnose` says of it.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[OttavaCallback()])
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ottava.base.errors import PoisonError
from ottava.base.text import listed
from ottava.diagnose.diagnose import Diagnosis
from ottava.diagnose.loss import Event
from ottava.doors.host import need_host
from ottava.record.schema import MANIFEST
from ottava.watching.live import Live, Numbers
from ottava.watching.session import Watch, watch
from ottava.weights.checkpoint import poisoned

need_host("transformers")

from accelerate.utils import reduce, wait_for_everyone  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

_LOG = logging.getLogger(__name__)


class OttavaCallback(TrainerCallback):
    """Logs the numbers of an FP8 run, keeps its record for `ottava diagnose`, and stops it on demand.

    docs/doors.md has a table of the numbers.

    Args:
        folder: of the watched run; None: `ottava` in the Trainer's output_dir.
        stop_when: gets each line of the log; True or a reason stops the training, with a checkpoint. Of several
            processes the first is asked.
        max_overhead: share of the run's time for the watch: a quarter for looks and facts, a quarter for shadow
            steps, the rest for what every step costs; see docs/doors.md.
        live: serves the report to a browser on this machine, as `ottava watch --live` does, up to the end of training.
        settings: further fields of WatchConfig, such as `shadow`, the steps from one shadow step to the next.

    A further number is one more function in `sources`, which the callback asks at every log.
    """

    def __init__(
        self,
        folder: Path | str | None = None,
        *,
        stop_when: Callable[[Mapping[str, Any]], bool | str] | None = None,
        max_overhead: float = 0.02,
        live: bool = False,
        **settings: Any,
    ) -> None:
        self.folder, self.stop_when, self.max_overhead = folder, stop_when, max_overhead
        # a Trainer divides each loss
        self.settings = {"max_overhead": max_overhead / 4, "early": False, "loss": "sum", **settings}
        self.settings |= {"sinks": [*settings.get("sinks", ()), "live"]} if live else {}
        self.sources: list[Callable[[], Numbers]] = []
        """What a log asks for further numbers."""
        self.watch: Watch | None = None
        """The watch of the training that runs, or of the last one."""
        self.stopped = ""
        """Why the training is to stop."""
        self._live: Live | None = None

    @property
    def event(self) -> Event | None:
        """The loss has left its band and stays outside; None: it has not."""
        return None if self._live is None else self._live.event

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The last diagnosis of the last 256 steps."""
        return None if self._live is None else self._live.diagnosis

    def stop(self, reason: str = "asked to") -> None:
        """Ends the training at its next log (of several processes: if any of them was asked to)."""
        self.stopped = reason

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Moves to the front of the Trainer's callbacks: the loggers stand before the user's own."""
        handler = sys._getframe(1).f_locals.get("self")
        callbacks = getattr(handler, "callbacks", None)
        if isinstance(callbacks, list) and self in callbacks:
            callbacks.insert(0, callbacks.pop(callbacks.index(self)))

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Begins to watch; a resumed training goes on in its folder."""
        self.on_train_end(args, state, control)  # of a training that an exception ended
        self.stopped = ""
        folder, resumed = _folder(Path(self.folder or Path(args.output_dir, "ottava")), state.global_step)
        self.watch = watch(model, folder, step=state.global_step, append=resumed, **self.settings)
        self._live = Live(self.watch, model, self.max_overhead)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Asks for the gradient norm of a step that is logged."""
        if self.watch is not None and not (state.global_step + 1) % max(int(state.logging_steps or 0), 1):
            self.watch.want_norm()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Adds the numbers to a line of the training; stops if somebody asked to."""
        if logs is None or "loss" not in logs or self._live is None:
            return
        if state.is_world_process_zero:  # the others log nothing, and write no steps
            for source in (self._live.numbers, *self.sources):
                logs |= source()
            if state.log_history and state.log_history[-1].get("step") == state.global_step:
                state.log_history[-1] |= logs
            answer = self.stop_when(logs) if self.stop_when is not None else False
            said = answer if isinstance(answer, str) else "stop_when said so" if answer else ""
            self.stopped = self.stopped or said
        if _any_rank(bool(self.stopped), args.device):
            control.should_training_stop, control.should_save = True, args.save_strategy != "no"
            _LOG.warning("ottava: training stops at step %d: %s", state.global_step, self.stopped or "another rank")

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Sets a checkpoint with NaN or infinity aside, so that no resumption takes it, and ends the training.

        Raises:
            PoisonError: in all processes, if a parameter is not finite in one of them; the message names some.
        """
        names = [] if model is None else poisoned(model, model.state_dict())
        if not _any_rank(bool(names), args.device):
            return
        saved = Path(args.output_dir, f"checkpoint-{state.global_step}")
        aside = saved.with_name(f"{saved.name}-not-finite")
        if args.should_save and saved.is_dir():
            saved.replace(aside)
        if self.watch is not None:
            self.watch.close("a checkpoint is not finite")
        said = f"{listed(names, 3) if names else 'parameters of another rank'} not finite"
        said += f"; the checkpoint is set aside as {aside}. Resume from one before it, with a lower learning rate"
        raise PoisonError(f"step {state.global_step}: {said}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends the watch."""
        if self.watch is not None:
            self.watch.close()


def _any_rank(wanted: bool, device: torch.device) -> bool:
    """Whether any process wants it: one that stops alone would leave the others waiting."""
    return float(reduce(torch.tensor(float(wanted), dtype=torch.float32, device=device), "sum")) > 0


def _folder(folder: Path, step: int) -> tuple[Path, bool]:
    """A folder for the record, and whether it goes on in it; all ranks choose before any of them writes."""
    taken = [one for one in (folder, *(Path(f"{folder}-{i}") for i in range(2, 1000))) if (one / MANIFEST).exists()]
    chosen = taken[-1] if taken and step else Path(f"{folder}-{len(taken) + 1}") if taken else folder
    wait_for_everyone()
    return chosen, bool(taken and step)
