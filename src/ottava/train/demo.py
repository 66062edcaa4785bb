"""The demo: one small model trained in BF16 with several seeds and in FP8 with several recipes, side by side.

The runs advance in turn, a few steps each. Their curves grow together, and other load on the machine slows all of them
alike: the ratios of their speeds hold even if the speeds do not. Each run is an ordinary `Trainer` in its own folder.
It computes the same bits as a run that trains alone, and can resume at any moment.

Its report is one HTML file without other files. The template (demo.html.j2) holds all words and the style; every number
comes from the `DemoResult`.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from pydantic import model_validator

from ottava.base.language import Language
from ottava.base.settings import ConfigError, Section
from ottava.base.text import progress, to_json
from ottava.base.untrusted import parse_json, read_text
from ottava.debug import observe
from ottava.measure.layer_names import starred
from ottava.nn.receipt import ReceiptRow, grouped
from ottava.recipe import get_recipe
from ottava.report.charts import Band, Chart, Estimate, Forest, Line, color, smooth, standalone
from ottava.report.frame import render
from ottava.train.checkpoint import atomic_write
from ottava.train.config import DEMO_SETTINGS, TrainConfig, load_config
from ottava.train.data import gather
from ottava.train.display import Display, RunView
from ottava.train.loop import Trainer
from ottava.train.run_folder import FolderLock
from ottava.train.verdict import REFERENCE, DemoResult, Machinery, RunResult


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
        self.trainer.advance(4)  # few enough steps for a lively display
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
        other = None if self.recipe == REFERENCE else reference.trainer
        return RunView.of(self.trainer, self.recipe, self.seed, 20, other)

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
        made = folder.settings.config
        self.runs = [
            Run(recipe, seed, Trainer(made(recipe, seed), folder.run(recipe, seed), resume=folder.resumed))
            for recipe, seed in folder.settings.runs()
        ]

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
                left = [run.seconds_left for run in self.runs]
                seconds = None if None in left else sum(filter(None, left))
                display.show([run.view(reference) for run in self.runs], seconds)
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
        candidates = [run for run in self.runs if run.recipe != REFERENCE]
        return DemoResult(
            runs=[run.result() for run in progress(self.runs, "evaluating")],
            machinery={run.recipe: run.machinery() for run in progress(candidates, "measuring casts")},
            command=self.folder.settings.command(),
            config=first.config.to_yaml(),
            text=first.corpus.source,
            parameters=self.parameters,
            facts=_facts(manifest),
            training_seconds=sum(record.seconds for run in self.runs for record in run.trainer.history),
        )

    def write(self, result: DemoResult, language: str = "en") -> None:
        """Writes report.html, loss.svg and summary.json, and marks the demo as finished."""
        self.folder.write("report.html", Language(language).page(render_report(result)))
        self.folder.write("loss.svg", render_picture(result))
        self.folder.write("summary.json", to_json(result.to_dict(), indent=1) + "\n")
        self.folder.mark(finished=True)


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


# --- its folder ------------------------------------------------------------------------------------------------------

RESULTS = ("report.html", "loss.svg", "summary.json")
DEFAULT_RECIPES = ("tensorwise", "blockwise")
DEFAULT_STEPS = 240
DEFAULT_FOLDER = Path("runs/demo")

_EVALUATIONS = 10
_OWN = MappingProxyType(
    {
        "recipe": "use --recipes",
        "seed": "use --seeds",
        "steps": "use --steps",
        "data.path": "use --data",
        "init": "its runs start from their seeds",
    }
)
"""Settings of the trainer that --set may not change, and why."""


class DemoSettings(Section):
    """The settings of a demo. Equal settings give equal losses on one machine."""

    recipes: tuple[str, ...] = DEFAULT_RECIPES
    """FP8 recipes, each trained with seed 0."""
    steps: int = DEFAULT_STEPS
    seeds: int = 3
    """BF16 runs, with seeds 0, 1, ...: their spread is the noise."""
    data: str | None = None
    """A text file or a folder of them, as an absolute path; None for the standard library's sources."""
    overrides: tuple[str, ...] = ()
    """Further settings of the trainer, each "a.b=c"."""

    @model_validator(mode="after")
    def _usable(self) -> Self:
        for recipe in self.recipes:
            get_recipe(recipe)  # the error names the nearest recipe
        if len(set(self.recipes)) < len(self.recipes) or "bf16" in self.recipes:
            raise ConfigError(f"recipes: got {', '.join(self.recipes)}; name each FP8 recipe once (BF16 always runs)")
        if self.seeds < 1:
            raise ConfigError(f"seeds: got {self.seeds}; needed: 1 or more")
        if self.steps < _EVALUATIONS:
            raise ConfigError(f"steps: got {self.steps}; needed: at least {_EVALUATIONS}, one for each evaluation")
        for override in self.overrides:
            if (name := override.partition("=")[0].strip()) in _OWN:
                raise ConfigError(f"--set {override}: the demo sets {name} itself: {_OWN[name]}")
        self.config("bf16", 0)  # refuses unknown settings before anything is written
        return self

    def runs(self) -> list[tuple[str, int]]:
        """Recipe and seed of every training run: BF16 first."""
        return [("bf16", seed) for seed in range(self.seeds)] + [(recipe, 0) for recipe in self.recipes]

    def config(self, recipe: str, seed: int) -> TrainConfig:
        """The settings of one training run. Raises ConfigError for an unknown or unsuitable override."""
        values = [
            f"recipe={recipe}",
            f"seed={seed}",
            f"steps={self.steps}",
            f"evaluation.every={self.steps // _EVALUATIONS}",
        ]
        values += [f"data.path={json.dumps(self.data)}"]
        return load_config(None, [*DEMO_SETTINGS, *values, *self.overrides])

    def command(self) -> str:
        """The command that repeats this demo, even if defaults change."""
        parts = [f"ottava demo --recipes {','.join(self.recipes)} --steps {self.steps} --seeds {self.seeds}"]
        parts += [f"--data {shlex.quote(self.data)}"] if self.data else []
        return " ".join([*parts, *(f"--set {shlex.quote(override)}" for override in self.overrides)])


@dataclass(frozen=True, eq=False)
class DemoFolder:
    """An opened folder: the settings, whether an earlier process began the demo, and `news` for the user."""

    path: Path
    settings: DemoSettings
    resumed: bool
    news: tuple[str, ...]
    lock: FolderLock
    """It holds the folder as long as this object lives."""

    @classmethod
    def open(cls, path: Path, chosen: Mapping[str, Any], *, resume: bool = False, fresh: bool = False) -> DemoFolder:
        """Continues the unfinished demo in a folder, or starts one in a new folder or beside a finished one.

        Args:
            path: the folder; it need not exist.
            chosen: the fields of `DemoSettings` that the user chose. The others are the defaults, or come from the
                resumed demo.
        Raises:
            DataError, DeviceError: as `gather`.
            ConfigError: another process holds the folder, the folder holds no demo, there is nothing to resume, or an
                unfinished demo has other settings. The message says what to do. The folder stays unchanged.
        """
        if resume and fresh:
            raise ConfigError("--resume continues the demo in the folder and --fresh discards it; give one of them")
        settings = DemoSettings(**chosen)
        lock = FolderLock(path)
        with lock.released_on_error():
            demo = _read(path)
            saved, finished = demo or (settings, False)
            if resume and demo is None:
                raise ConfigError(f"{path}: holds no demo to resume; leave --resume out to start one")
            if resume and finished:
                report = path / "report.html"
                raise ConfigError(f"{path}: its demo is finished ({report}); leave --resume out to run it again")
            if demo is not None and not finished and not fresh:
                expected = DemoSettings(**{**dict(saved), **chosen}) if resume else settings
                if expected != saved:
                    old, new = dict(saved), dict(expected)
                    changes = "; ".join(f"{n} was {old[n]!r}, now {new[n]!r}" for n in old if old[n] != new[n])
                    raise ConfigError(
                        f"{path}: holds an unfinished demo with other settings ({changes}). Continue it with --resume "
                        "alone, discard it with --fresh, or give another folder with --run-dir"
                    )
                news = f"continuing the unfinished demo in {path} (--fresh starts over)"
                return cls(path, saved, resumed=True, news=(news,), lock=lock)
            gather(settings.config("bf16", 0))  # refuses a missing text, device or memory before anything is removed
            news = _set_aside(path) if finished else f"discarded the unfinished demo in {path}" if demo else ""
            shutil.rmtree(path / "runs", ignore_errors=True)
            folder = cls(path, settings, resumed=False, news=(news,) if news else (), lock=lock)
            folder.mark(finished=False)
            return folder

    def run(self, recipe: str, seed: int) -> Path:
        """The folder of one training run."""
        return self.path / "runs" / f"{recipe.replace('/', '-')}-seed{seed}"

    def mark(self, *, finished: bool) -> None:
        """Writes demo.json."""
        values = {"schema_version": 1, "finished": finished, "settings": self.settings.model_dump()}
        self.write("demo.json", json.dumps(values, indent=2) + "\n")

    def write(self, name: str, text: str) -> Path:
        """Writes a file atomically and returns its path."""
        self.path.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.path / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
        return self.path / name


def _read(path: Path) -> tuple[DemoSettings, bool] | None:
    """The settings of the demo, and whether it is finished. None if the folder is empty."""
    if not any(entry for entry in path.iterdir() if not entry.name.startswith(".")):
        return None
    try:
        values = parse_json(read_text(path / "demo.json"))
        return DemoSettings(**values["settings"]), bool(values["finished"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path}: holds files, but no demo of this version; give another folder with --run-dir"
        ) from error


def _set_aside(path: Path) -> str:
    """Moves the results of the finished demo into earlier/ and returns a line about it."""
    stamp = datetime.fromtimestamp((path / "demo.json").stat().st_mtime, UTC).strftime("%Y-%m-%dT%H-%M-%S")
    aside = path / "earlier" / stamp
    aside.mkdir(parents=True, exist_ok=True)
    for name in RESULTS:
        if (path / name).exists():
            (path / name).replace(aside / name)
    return f"running again; the report of the earlier demo is now in {aside}"


# The three tensors that a Linear casts, with their names in the report.
_TENSORS = MappingProxyType({"input": "Input X", "weight": "Weight W", "grad_output": "Gradient dY"})

# Limits of the three tints. For a normal distribution E4M3 gives about 31 dB and E5M2 about 25.
_SQNR_STEPS = (22.0, 16.0, 10.0)
_UNDERFLOW_STEPS = (0.1, 1.0, 10.0)


def render_report(result: DemoResult) -> str:
    """The whole report as one HTML document, without network, with a short script for the tooltips.

    Raises:
        ValueError: the result has no runs (see `DemoResult`).
    """
    return render(
        __package__,
        "demo.html.j2",
        result=result,
        styles=styles(result),
        color=color,
        charts=(loss_chart(result), difference_chart(result)),
        ends=ends_chart(result),
        steps=[step for step, _ in result.runs[0].validation],
        receipts={recipe: grouped([ReceiptRow(**row) for row in m.receipt]) for recipe, m in result.machinery.items()},
        heat={recipe: heat_grids(machinery.numbers) for recipe, machinery in result.machinery.items()},
    )


def render_picture(result: DemoResult) -> str:
    """The two charts as one SVG file with its own background."""
    captions = [verdict.sentence for verdict in result.news[:2]]
    return standalone([loss_chart(result), difference_chart(result)], title=result.headline, captions=captions)


def styles(result: DemoResult) -> dict[str, int]:
    """The style number of each recipe (colour, dash and marker): 0 for BF16, then in order."""
    return {REFERENCE: 0} | {run.recipe: i for i, run in enumerate(result.candidates, start=1)}


def loss_chart(result: DemoResult) -> Chart:
    """Validation losses over smoothed training losses, with the BF16 seeds as a band."""
    lines = []
    for run in _compared(result):
        style = styles(result)[run.recipe]
        curve = list(enumerate(smooth(run.losses, span=16), start=1))
        lines.append(Line(name=f"{run.recipe}, training", points=curve, style=style, faint=True))
    for run in _compared(result):
        lines.append(Line(name=run.recipe, points=run.validation, style=styles(result)[run.recipe], markers=True))
    highest = max((run.losses[0] for run in result.references if math.isfinite(run.losses[0])), default=6.0)
    lowest = min((y for line in lines for _, y in line.points if math.isfinite(y)), default=0.0)
    return Chart(
        title="Validation loss",
        description="Loss on held-out text by training step, one line for each recipe; thin: smoothed training loss. "
        + " ".join(verdict.sentence + "." for verdict in result.verdicts),
        x_label="step",
        y_label="nats per byte",
        lines=lines,
        bands=_seed_band(result, relative=False),
        x_range=(0, len(result.runs[0].losses)),
        y_range=(lowest - 0.1, highest + 0.1),
    )


def difference_chart(result: DemoResult) -> Chart:
    """Each recipe minus BF16 of the same seed, over the spread of the BF16 seeds. The axis fits the second half."""
    lines = []
    for run in _compared(result):
        reference = dict(result.reference_of(run).validation)
        points = [(step, loss - reference[step]) for step, loss in run.validation if step in reference]
        lines.append(Line(name=run.recipe, points=points, style=styles(result)[run.recipe], markers=True))
    bands = _seed_band(result, relative=True)
    half = max(step for step, _ in result.runs[0].validation) / 2
    late = [y for line in lines for x, y in line.points if x >= half]
    late += [y for band in bands for x, low, high in band.points if x >= half for y in (low, high)]
    reach = 1.25 * max((abs(y) for y in late if math.isfinite(y)), default=0.0) or 0.01
    return Chart(
        title="Difference to BF16",
        description="Validation loss of each recipe minus that of BF16 with the same seed, by training step. "
        "The band reaches to either side as far as the BF16 seeds lie apart.",
        x_label="step",
        y_label="nats per byte",
        lines=lines,
        bands=bands,
        x_range=(0, len(result.runs[0].losses)),
        y_range=(-reach, reach),
        signed=True,
    )


def _compared(result: DemoResult) -> list[RunResult]:
    """The first BF16 seed and every FP8 run; the other seeds are the band."""
    return [result.reference_of(result.runs[0]), *result.candidates]


def _seed_band(result: DemoResult, *, relative: bool) -> list[Band]:
    """Lowest to highest BF16 seed at each evaluation. Relative: their distance to either side of 0, the verdict's
    "inside". Empty for one seed."""
    if len(result.references) < 2:
        return []
    points = []
    curves = [dict(run.validation) for run in result.references]
    for step in curves[0]:
        losses = [curve[step] for curve in curves if step in curve]
        spread = max(losses) - min(losses)
        points.append((float(step), -spread, spread) if relative else (float(step), min(losses), max(losses)))
    return [Band(name=f"{'spread' if relative else 'range'} of {len(curves)} bf16 seeds", points=points)]


def ends_chart(result: DemoResult) -> Forest | None:
    """Final losses on one axis; shaded is the verdict's "inside". None if BF16 diverged or all losses are equal."""
    reference = result.reference_of(result.runs[0])
    losses = [run.final_loss for run in result.runs if not run.diverged]
    if reference.diverged or len(losses) < 2 or min(losses) == max(losses):
        return None
    spread = result.noise.spread or 0.0
    ends: dict[str, list[float]] = {run.recipe: [] for run in result.runs}
    for run in result.runs:
        ends[run.recipe] += [] if run.diverged else [run.final_loss]
    rows = [
        (name, [Estimate(mean=at[0], low=min(at), high=max(at), style=styles(result)[name], values=at)])
        if at
        else (f"{name}, diverged", [])
        for name, at in ends.items()
    ]
    return Forest(
        title="Where the runs end",
        description="Final validation loss of each run. " + " ".join(f"{one.sentence}." for one in result.verdicts),
        x_label="nats per byte; left is better",
        rows=rows,
        band=(reference.final_loss - spread, reference.final_loss + spread),
        width=640,
    )


@dataclass(frozen=True)
class Cell:
    """A number of a heat table, its tint (0 to 3), and the words of its tooltip."""

    text: str
    level: int
    hint: str


HeatGrid = tuple[str, list[str], list[tuple[str, list[Cell | None]]]]
"""One tensor: its title, layer numbers across, and down a row of cells for each kind of layer."""


def heat_grids(rows: Sequence[Mapping[str, object]]) -> dict[str, list[HeatGrid]]:
    """The error of each tensor's cast, as small tables: {"SQNR, dB": [...], "underflow, %": [...]}.

    A tensor may be cast twice, along rows and along columns. The cell shows the worse cast, the tooltip both.
    """
    return {
        "Signal to quantization noise, dB": [_grid(rows, tensor, "sqnr_db") for tensor in _TENSORS],
        "Underflow to zero, %": [_grid(rows, tensor, "underflow_pct") for tensor in _TENSORS],
    }


def _grid(rows: Sequence[Mapping[str, object]], tensor: str, metric: str) -> HeatGrid:
    cells: dict[tuple[str, int | None], list[Mapping[str, object]]] = {}
    for row in rows:
        if row["tensor"] == tensor:
            cells.setdefault(starred(str(row["layer"])), []).append(row)
    numbers = sorted({number for _, number in cells}, key=lambda n: -1 if n is None else n)
    # the order of the forward, also for gradients, which arrive in reverse order
    order = dict.fromkeys(starred(str(row["layer"]))[0] for row in rows)
    kinds = [kind for kind in order if any((kind, number) in cells for number in numbers)]
    columns = ["" if number is None else str(number) for number in numbers]
    rows_of = {kind: [cells.get((kind, number)) for number in numbers] for kind in kinds}
    shown = [(kind, [_cell(one, metric) if one else None for one in row]) for kind, row in rows_of.items()]
    return _TENSORS[tensor], columns, shown


def _cell(rows: Sequence[Mapping[str, object]], metric: str) -> Cell:
    values = [float(str(row[metric])) for row in rows]
    is_sqnr = metric == "sqnr_db"
    worst = min(values) if is_sqnr else max(values)
    if is_sqnr:
        text, level = _sqnr_text(worst), sum(worst < step for step in _SQNR_STEPS)
    else:
        text, level = f"{worst:.2f}" if worst < 10 else f"{worst:.0f}", sum(worst > step for step in _UNDERFLOW_STEPS)
    unit = "dB" if is_sqnr else "%"
    hint = "; ".join(
        f"{row['direction']}: {row['format']} {row['granularity']}, {value:.3g} {unit}, amax {row['amax']:.3g}"
        for row, value in zip(rows, values, strict=True)
    )
    return Cell(text, level, hint)


def _sqnr_text(value: float) -> str:
    if math.isnan(value):
        return "\N{EN DASH}"  # all elements of the tensor are zero
    return "exact" if math.isinf(value) else f"{value:.1f}"
