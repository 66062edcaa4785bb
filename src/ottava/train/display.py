"""The display of training runs: a live table in a terminal, plain lines anywhere else.

Both show the same `RunView`s. The live table needs a terminal that can move its cursor and print block characters. A
pipe, a log file, a CI machine or an ASCII locale gets one line every few seconds. Colour only repeats a word or a sign;
rich prints none if NO_COLOR is set.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ottava.base.text import duration, signed
from ottava.report.charts import smooth

if TYPE_CHECKING:
    from ottava.train.loop import Trainer
    from ottava.train.run_folder import StepRecord

_BLOCKS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 22
_OTHER_WIDTH = 52  # width of the table without its first and last column


@dataclass(frozen=True, kw_only=True)
class RunView:
    """The present state of one run."""

    recipe: str
    seed: int
    step: int
    steps: int
    loss: float | None
    """Smoothed training loss in nats per byte; None before the first step."""
    delta: float | None
    """Loss minus that of BF16 at the same seed and step; None for BF16 itself, and until both have reached the step."""
    tokens_per_second: float | None
    curve: Sequence[float]
    """Smoothed losses so far, for the sparkline."""

    @classmethod
    def of(cls, trainer: Trainer, recipe: str, seed: int, recent: int, reference: Trainer | None = None) -> RunView:
        """Of a trainer; recent: steps whose median is the speed; reference: the BF16 run of this seed."""
        curve = smooth([record.loss for record in trainer.history])
        other = [] if reference is None else smooth([record.loss for record in reference.history])
        delta = next((a - b for a, b in reversed(list(zip(curve, other, strict=False)))), None)
        loss, speed = curve[-1] if curve else None, tokens_per_second(trainer.history[-recent:])
        at = {"step": trainer.step, "steps": trainer.config.steps}
        return cls(recipe=recipe, seed=seed, **at, loss=loss, delta=delta, tokens_per_second=speed, curve=curve)

    @property
    def diverged(self) -> bool:
        """Whether the loss is no longer a number."""
        return self.loss is not None and not math.isfinite(self.loss)


def tokens_per_second(records: Sequence[StepRecord]) -> float | None:
    """The rate of the median step, which a few slow steps do not change. None before the first step."""
    return records[-1].tokens / statistics.median(record.seconds for record in records) if records else None


class PlainDisplay:
    """A line every `every` seconds, and one at the end: share done, step, loss of each recipe, time left."""

    def __init__(self, console: Console, *, every: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._every = every
        self._clock = clock
        self._last = -math.inf
        self._pending: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pending is not None:
            self.say(self._pending)

    def show(self, runs: Sequence[RunView], seconds_left: float | None) -> None:
        """Shows the present state of the runs; cheap enough for a call after every few steps."""
        self._pending = plain_line(runs, seconds_left)
        if self._clock() - self._last >= self._every:
            self._last = self._clock()
            self.say(self._pending)
            self._pending = None

    def say(self, message: str) -> None:
        """Prints one line that stays."""
        # soft_wrap: rich must not break lines of a log at a default width
        self._console.print(message, soft_wrap=True, highlight=False, markup=False)


class LiveDisplay:
    """A table with a row for each run above a progress bar; both redraw in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def show(self, runs: Sequence[RunView], seconds_left: float | None) -> None:
        """Draws the table anew."""
        self._live.update(live_table(runs, seconds_left, width=self._console.width), refresh=True)

    def say(self, message: str) -> None:
        """Prints one line above the table, which stays."""
        self._console.print(Text(message))


Display = LiveDisplay | PlainDisplay
"""A context manager that shows runs."""


def open_display(console: Console) -> Display:
    """The live table if the console can show it, plain lines otherwise: notebooks and CI ask for colours in a pipe."""
    if console.file.isatty() and not console.is_dumb_terminal and console.encoding.lower().startswith("utf"):
        return LiveDisplay(console)
    return PlainDisplay(console)


def plain_line(runs: Sequence[RunView], seconds_left: float | None) -> str:
    """All runs of the first seed in one line.

    Example: "38 %  step 120/300  bf16 2.031  tensorwise 2.034 (+0.003)  41 s left"
    """
    parts = [f"{100 * share_done(runs):3.0f} %", f"step {min(run.step for run in runs)}/{runs[0].steps}"]
    for run in runs:
        if run.seed == runs[0].seed:
            difference = "" if run.delta is None else f" ({signed(run.delta)})"
            parts.append(f"{run.recipe} {loss_text(run)}{difference}")
    if seconds_left is not None:
        parts.append(f"{duration(round(seconds_left))} left")
    return "  ".join(parts)


def live_table(runs: Sequence[RunView], seconds_left: float | None, *, width: int) -> RenderableType:
    """The table and the progress bar for a console of that width. The curves get the columns that the numbers leave."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="dim")
    table.add_column("recipe", min_width=11, no_wrap=True)
    for heading in ("seed", "step", "loss", "Δ to BF16", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    room = width - _OTHER_WIDTH - max(11, *(len(run.recipe) for run in runs))
    whole_curve = max(1, min(_CURVE_WIDTH, room))
    table.add_column("curve", width=whole_curve, no_wrap=True)
    losses = [loss for run in runs for loss in run.curve if math.isfinite(loss)]
    low, high = (min(losses), max(losses)) if losses else (0.0, 1.0)
    for run in runs:
        is_reference = run.recipe == runs[0].recipe
        curve_width = math.ceil(whole_curve * run.step / run.steps)  # the curve grows with the run
        style = "red" if run.diverged else "dim" if is_reference and run.seed else ""
        table.add_row(
            Text(run.recipe, style=style or ("" if is_reference else "bold")),
            str(run.seed),
            f"{run.step}/{run.steps}",
            loss_text(run),
            "" if run.delta is None else signed(run.delta),
            "" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
            Text(sparkline(run.curve, low=low, high=high, width=curve_width), style=style or "cyan"),
            style=style,
        )
    share = share_done(runs)
    time_left = "" if seconds_left is None else f"  {duration(round(seconds_left))} left"
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=1.0, completed=share, width=46, complete_style="cyan", finished_style="green"),
        Text(f"{100 * share:3.0f} %{time_left}", style="dim"),
    )
    return Group(table, Padding(bar, (0, 0, 1, 0)))


def sparkline(values: Sequence[float], *, low: float, high: float, width: int = _CURVE_WIDTH) -> str:
    """A curve as block characters, with the lowest block at `low`. A value that is not finite is "!".

    Example:
        >>> sparkline([3.0, 2.0, 1.0], low=1.0, high=3.0)
        '█▄▁'
    """
    if len(values) > width:
        values = [values[(i + 1) * len(values) // width - 1] for i in range(width)]
    top = len(_BLOCKS) - 1
    scale = top / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[int((v - low) * scale)] if math.isfinite(v) else "!" for v in values)


def share_done(runs: Sequence[RunView]) -> float:
    """Share of the steps that are done, 0 to 1."""
    return sum(run.step for run in runs) / sum(run.steps for run in runs)


def loss_text(run: RunView) -> str:
    """The loss with three decimals, "diverged", or nothing before the first step."""
    if run.loss is None:
        return ""
    return "diverged" if run.diverged else f"{run.loss:.3f}"
