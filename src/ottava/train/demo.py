"""The demo: one small model trained in BF16 with several seeds and in FP8 with several recipes, side by side.

The runs advance in turn, a few steps each. Their curves grow together, and other load on the machine slows all of them
alike: the ratios of their speeds hold even if the speeds do not. Each run is an ordinary `Trainer` in its own folder.
It computes the same bits as a run that trains alone, and can resume at any moment.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from ottava.base.text import to_json
from ottava.debug import observe
from ottava.report.charts import smooth
from ottava.train.demo_folder import DemoFolder
from ottava.train.display import Display, RunView
from ottava.train.loop import Trainer
from ottava.train.report import render_picture, render_report
from ottava.train.summary import REFERENCE, DemoResult, Machinery, RunResult

_STEPS_PER_TURN = 4  # few enough for a lively display
_RECENT = 20  # steps in the median that the display shows as speed


class Run:
    """One training run of the demo."""

    def __init__(self, recipe: str, seed: int, trainer: Trainer) -> None:
        self.recipe = recipe
        self.seed = seed
        self.trainer = trainer
        self._busy = 0.0  # seconds of this process, evaluation and checkpoints included
        self._first = trainer.step

    def advance(self) -> None:
        """Trains a few steps; nothing if the run is done."""
        began = time.perf_counter()
        self.trainer.advance(_STEPS_PER_TURN)
        self._busy += time.perf_counter() - began

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds to the end, at the speed of this process so far; None before its first step."""
        done = self.trainer.step - self._first
        if self.trainer.done:
            return 0.0
        return self._busy / done * (self.trainer.config.steps - self.trainer.step) if done else None

    def view(self, reference: Run) -> RunView:
        """The state of the run, compared with the BF16 run of the same seed."""
        curve = smooth([record.loss for record in self.trainer.history])
        other = smooth([record.loss for record in reference.trainer.history])
        compared = min(len(curve), len(other)) - 1
        recent = [record.seconds for record in self.trainer.history[-_RECENT:]]
        return RunView(
            recipe=self.recipe,
            seed=self.seed,
            step=self.trainer.step,
            steps=self.trainer.config.steps,
            loss=curve[-1] if curve else None,
            delta=curve[compared] - other[compared] if compared >= 0 and self.recipe != REFERENCE else None,
            tokens_per_second=self.trainer.history[-1].tokens / statistics.median(recent) if recent else None,
            curve=curve,
        )

    def result(self) -> RunResult:
        """The result of the finished run. Evaluates the run once more, in high precision."""
        history = self.trainer.history
        validation = [(record.step, record.val_loss) for record in history if record.val_loss is not None]
        if self.trainer.diverged:
            validation.append((history[-1].step, float("nan")))
        return RunResult(
            recipe=self.recipe,
            seed=self.seed,
            losses=[record.loss for record in history],
            validation=validation,
            high_precision_loss=self.trainer.evaluate(high_precision=True),
            # the first steps warm caches and allocators up
            seconds_per_step=statistics.median(record.seconds for record in history[min(3, len(history) - 1) :]),
            tokens_per_step=history[-1].tokens,
            diverged_at=history[-1].step if self.trainer.diverged else None,
        )

    def machinery(self) -> Machinery:
        """The receipt of the last step, and the casts of one more batch."""
        trainer = self.trainer
        # the trainer wrote the receipt after its last step; an evaluation has since run on the same layers
        receipt: dict[str, Any] = json.loads((trainer.folder.path / "receipt.json").read_text(encoding="utf-8"))
        with observe(trainer.model) as observation:
            trainer.loss_of(trainer.model, trainer.batch(trainer.config.steps + 1)).backward()
        trainer.model.zero_grad()
        return Machinery(
            receipt=receipt["rows"],
            fp8_fraction=receipt["fp8_fraction"],
            skipped=trainer.conversion.skipped,
            numbers=observation.table(),
        )


class Demo:
    """All runs of a demo, in an opened folder.

    Raises:
        ConfigError, DataError, CheckpointError, DeviceError: as `Trainer` does.
    """

    def __init__(self, folder: DemoFolder) -> None:
        self.folder = folder
        self.runs = [Run(recipe, seed, self._trainer(recipe, seed)) for recipe, seed in folder.settings.runs()]

    @property
    def done(self) -> bool:
        """Whether every run is done."""
        return all(run.trainer.done for run in self.runs)

    @property
    def parameters(self) -> int:
        """Number of parameters of the model, the same for every run."""
        return sum(parameter.numel() for parameter in self.runs[0].trainer.model.parameters())

    def train(self, display: Display, stopping: Callable[[], object]) -> bool:
        """Advances the runs in turn until all are done or `stopping()`; then saves the unfinished runs.

        Returns:
            Whether all runs are done.
        """
        reference = self.runs[0]  # every FP8 run has the seed of this run
        while not self.done and not stopping():
            for run in self.runs:
                run.advance()
                display.show([run.view(reference) for run in self.runs], self._seconds_left())
                if stopping():
                    break
        for run in self.runs:
            if not run.trainer.done:
                run.trainer.save()
                run.trainer.close()
        return self.done

    def result(self) -> DemoResult:
        """Measures the finished runs once more and collects everything."""
        first = self.runs[0].trainer
        manifest: dict[str, Any] = json.loads((first.folder.path / "manifest.json").read_text(encoding="utf-8"))
        return DemoResult(
            runs=[run.result() for run in self.runs],
            machinery={run.recipe: run.machinery() for run in self.runs if run.recipe != REFERENCE},
            command=self.folder.settings.command(),
            config=first.config.to_yaml(),
            text=first.corpus.source,
            parameters=self.parameters,
            facts=_facts(manifest),
            training_seconds=sum(record.seconds for run in self.runs for record in run.trainer.history),
        )

    def write(self, result: DemoResult) -> None:
        """Writes report.html, loss.svg and summary.json, and marks the demo as finished."""
        self.folder.write("report.html", render_report(result))
        self.folder.write("loss.svg", render_picture(result))
        self.folder.write("summary.json", to_json(result.to_dict(), indent=1) + "\n")
        self.folder.mark(finished=True)

    def _trainer(self, recipe: str, seed: int) -> Trainer:
        return Trainer(
            self.folder.settings.config(recipe, seed), self.folder.run(recipe, seed), resume=self.folder.resumed
        )

    def _seconds_left(self) -> float | None:
        times = [run.seconds_left for run in self.runs]
        estimates = [seconds for seconds in times if seconds is not None]
        return sum(estimates) if len(estimates) == len(times) else None


def _facts(manifest: Mapping[str, Any]) -> dict[str, str]:
    versions = {name: str(version) for name, version in manifest["versions"].items()}
    commit = {"commit": manifest["commit"]} if manifest["commit"] else {}
    return {
        "started": datetime.fromisoformat(manifest["started"]).strftime("%Y-%m-%d %H:%M %Z"),
        **versions,
        **commit,
        "device": manifest["device"],
        "platform": manifest["platform"],
        "threads": str(manifest["threads"]),
    }
