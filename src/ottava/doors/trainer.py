"""`OttavaCallback` puts ottava's numbers into the logs of transformers' Trainer and of TRL's, and watches the run.

Numbers travel in the dict of `Trainer.log`, so they arrive wherever the user logs: Weights & Biases, TensorBoard,
trackio, MLflow, the terminal, trainer_state.json. Between two logs the callback reads nothing back from a device.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[OttavaCallback()])
"""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ottava.doors.host import need_host
from ottava.measure.limits import LEAST, WINDOW, robust_z
from ottava.nn.receipt import receipt
from ottava.record.reader import Table
from ottava.record.schema import MANIFEST
from ottava.watching.loss import LossTap
from ottava.watching.session import Watch, watch

need_host("transformers")

from transformers import TrainerCallback  # noqa: E402

_LOG = logging.getLogger(__name__)
Numbers = dict[str, float | str]


class OttavaCallback(TrainerCallback):
    """Logs five numbers of an FP8 run, keeps its record for `ottava diagnose`, and stops it on demand.

        ottava/fp8_share       share of the linear work that ran with quantized operands, 0 to 1
        ottava/worst_sqnr_db   row SQNR of the worst cast in the last look; ottava/worst_tensor names it
        ottava/grad_norm       the largest gradient norm since the last log, before clipping
        ottava/loss_z          the largest distance of a step's loss above the losses before, in standard deviations
        ottava/loss_events     steps so far with a loss that is not finite, or whose distance is above `loss_z`

    Args:
        folder: of the watched run; None: `ottava` in the Trainer's output_dir.
        stop_when: gets each line of the log; True or a reason stops the training, with a checkpoint.
        loss_z: the distance of a loss event.
        max_overhead: largest share of the run's time for the watch.
        settings: further fields of WatchConfig.

    A further number is one more function in `sources`, which the callback asks at every log.
    """

    def __init__(
        self,
        folder: Path | str | None = None,
        *,
        stop_when: Callable[[Mapping[str, Any]], bool | str] | None = None,
        loss_z: float = 6.0,
        max_overhead: float = 0.02,
        **settings: Any,
    ) -> None:
        self.folder, self.stop_when, self.loss_z = folder, stop_when, loss_z
        self.settings = {"max_overhead": max_overhead, "loss": "sum", **settings}  # a Trainer divides each loss
        self.sources: list[Callable[[], Numbers]] = [self._last_look, self._gradient_norm, self._losses]
        """What a log asks for its numbers."""
        self.watch: Watch | None = None
        """The watch of the training that runs, or of the last one."""
        self.events: list[int] = []
        """The steps of loss events."""
        self.stopped = ""
        """Why the training is to stop."""
        self._model: nn.Module | None = None
        self._seen: Numbers = {}
        self._norms: list[Tensor] = []
        self._parts: list[Tensor] = []
        self._steps: list[Tensor] = []
        self._earlier: deque[float] = deque(maxlen=WINDOW)
        self._last_step = 0
        self._tap = LossTap(lambda loss: self._parts.append(loss.to(torch.float32)))
        self._clip: Any = None

    def stop(self, reason: str = "asked to") -> None:
        """Ends the training at its next log (of several processes: if any of them was asked to)."""
        self.stopped = reason

    # --- what the Trainer calls -----------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Moves to the front of the Trainer's callbacks: the loggers stand before the user's own."""
        handler = sys._getframe(1).f_locals.get("self")
        callbacks = getattr(handler, "callbacks", None)
        if isinstance(callbacks, list) and self in callbacks:
            callbacks.insert(0, callbacks.pop(callbacks.index(self)))

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Begins to watch; a resumed training goes on in its folder."""
        self.on_train_end(args, state, control)  # of a training that an exception ended
        self._model, self._last_step, self.stopped = model, state.global_step, ""
        folder, resumed = _folder(Path(self.folder or Path(args.output_dir, "ottava")), state.global_step)
        self.watch = watch(model, folder, step=state.global_step, append=resumed, **self.settings)
        self.watch.on_look(self._look)
        self._tap.attach()
        self._clip = torch.nn.utils.clip_grad_norm_
        torch.nn.utils.clip_grad_norm_ = self._clipped(self._clip)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Adds up the loss of a step."""
        if self._parts:
            self._steps.append(torch.stack(self._parts).sum())
            self._parts.clear()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Adds the numbers to a line of the training; stops if somebody asked to."""
        if logs is None or "loss" not in logs:
            return
        for source in self.sources:
            logs |= source()
        self._last_step = state.global_step
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1] |= logs
        answer = self.stop_when(logs) if self.stop_when is not None else False
        self.stopped = self.stopped or (answer if isinstance(answer, str) else "stop_when said so" if answer else "")
        if _any_rank(bool(self.stopped), self._model):
            control.should_training_stop, control.should_save = True, args.save_strategy != "no"
            _LOG.warning("ottava: training stops at step %d: %s", state.global_step, self.stopped or "another rank")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends the watch, and gives torch its functions back."""
        self._tap.detach()
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_, self._clip = self._clip, None
        if self.watch is not None:
            self.watch.close()

    # --- sources of numbers ---------------------------------------------------------------------------------------

    def _look(self, step: int, table: Table) -> None:
        """After each full look of the watch."""
        sqnr, slots = np.asarray(table.metric("row_sqnr_p50_db")), table.keys()
        real = np.array([slot.source == "door" for slot in slots], dtype=bool)
        known = np.where(np.isnan(sqnr) | (~real if real.any() else False), np.inf, sqnr)
        self._seen = {"ottava/fp8_share": receipt(self._model).fp8_fraction} if self._model is not None else {}
        if len(known) and math.isfinite(known.min()):
            worst = slots[int(known.argmin())]
            self._seen["ottava/worst_sqnr_db"] = float(known.min())
            self._seen["ottava/worst_tensor"] = f"{worst.layer}/{worst.tensor}"

    def _last_look(self) -> Numbers:
        return dict(self._seen)

    def _gradient_norm(self) -> Numbers:
        norms, self._norms = self._norms, []
        whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
        return {"ottava/grad_norm": float(torch.stack(whole).max())} if whole else {}

    def _clipped(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`clip_grad_norm_` that keeps what it returns: the norm before it clips."""

        @functools.wraps(original)
        def clip(*args: Any, **kwargs: Any) -> Tensor:
            norm = original(*args, **kwargs)
            self._norms.append(norm.detach())
            return norm

        return clip

    def _losses(self) -> Numbers:
        values = torch.stack(self._steps).tolist() if self._steps else []
        self._steps.clear()
        largest = -math.inf
        for step, loss in enumerate(values, self._last_step + 1):
            z = robust_z(loss, self._earlier) if len(self._earlier) >= LEAST and math.isfinite(loss) else 0.0
            if not math.isfinite(loss) or z > self.loss_z:
                self.events.append(step)
                _LOG.warning("ottava: loss event at step %d: %.4g, z %.1f", step, loss, z)
            self._earlier += [loss] if math.isfinite(loss) else []
            largest = max(largest, z)
        shown: Numbers = {"ottava/loss_z": largest} if len(self._earlier) > LEAST and values else {}
        return {**shown, "ottava/loss_events": len(self.events)}


def _folder(folder: Path, step: int) -> tuple[Path, bool]:
    """A folder for the record, and whether it goes on in it; all ranks choose before any of them writes."""
    taken = [one for one in (folder, *(Path(f"{folder}-{i}") for i in range(2, 1000))) if (one / MANIFEST).exists()]
    chosen = taken[-1] if taken and step else Path(f"{folder}-{len(taken) + 1}") if taken else folder
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
    return chosen, bool(taken and step)


def _any_rank(wanted: bool, model: nn.Module | None) -> bool:
    """Whether any process wants it: one that stops alone would leave the others waiting."""
    if not (dist.is_available() and dist.is_initialized()) or model is None:
        return wanted
    flag = torch.tensor([float(wanted)], device=next(model.parameters()).device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())
