"""The folder of a demo, and what a new demo does with an earlier one in the same folder.

    demo.json                     the settings, and whether the demo is finished
    runs/bf16-seed0/ ...          one run folder for each training run (see run_folder.py)
    report.html  loss.svg  summary.json
    earlier/2025-11-21T09-31-07/  these three files of an earlier, finished demo

| the folder holds           | no option                       | --resume              | --fresh               |
|----------------------------|---------------------------------|-----------------------|-----------------------|
| nothing                    | starts                          | refused               | starts                |
| an unfinished demo         | continues, if settings agree    | continues             | discards it, starts   |
| a finished demo            | keeps its report, starts        | refused               | keeps its report, starts |
| anything else              | refused                         | refused               | refused               |

The demo deletes only its own files. Running the same command twice loses no result.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from ottava.base.settings import ConfigError
from ottava.base.untrusted import parse_json, read_text
from ottava.recipe import get_recipe
from ottava.train.checkpoint import atomic_write
from ottava.train.config import TrainConfig, load_config
from ottava.train.folder_lock import FolderLock
from ottava.train.requirements import gather
from ottava.train.verdict import MAX_SEEDS

DEMO_VERSION = 1
RESULTS = ("report.html", "loss.svg", "summary.json")
DEFAULT_RECIPES = ("tensorwise", "blockwise")
DEFAULT_STEPS = 240
DEFAULT_SEEDS = 3
DEFAULT_FOLDER = Path("runs/demo")

_EVALUATIONS = 10
DEMO_SETTINGS = (
    "batch_size=16",
    "sequence_length=64",  # in so few steps, more and shorter sequences learn faster
    "schedule.warmup_fraction=0.2",  # after a slow start the seeds end closer together, and smaller differences show
    "evaluation.batches=8",
    "checkpoint.every=50",
    "checkpoint.keep=1",
)
"""The demo's own values for settings of the trainer."""
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


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """The settings of a demo. Equal settings give equal losses on one machine."""

    recipes: tuple[str, ...] = DEFAULT_RECIPES
    """FP8 recipes, each trained with seed 0."""
    steps: int = DEFAULT_STEPS
    seeds: int = DEFAULT_SEEDS
    """BF16 runs, with seeds 0, 1, ...: their spread is the noise."""
    data: str | None = None
    """A text file or a folder of them, as an absolute path; None for the standard library's sources."""
    overrides: tuple[str, ...] = ()
    """Further settings of the trainer, each "a.b=c"."""

    def __post_init__(self) -> None:
        for recipe in self.recipes:
            get_recipe(recipe)  # the error names the nearest recipe
        if len(set(self.recipes)) < len(self.recipes) or "bf16" in self.recipes:
            raise ConfigError(f"recipes: got {', '.join(self.recipes)}; name each FP8 recipe once (BF16 always runs)")
        if not 1 <= self.seeds <= MAX_SEEDS:
            raise ConfigError(f"seeds: got {self.seeds}; needed: 1 to {MAX_SEEDS}")
        if self.steps < _EVALUATIONS:
            raise ConfigError(f"steps: got {self.steps}; needed: at least {_EVALUATIONS}, one for each evaluation")
        for override in self.overrides:
            if (name := override.partition("=")[0].strip()) in _OWN:
                raise ConfigError(f"--set {override}: the demo sets {name} itself: {_OWN[name]}")
        self.config("bf16", 0)  # refuses unknown settings before anything is written

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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict` through JSON."""
        tuples = {name: tuple(values[name]) for name in ("recipes", "overrides")}
        return cls(**{**values, **tuples})

    def command(self) -> str:
        """The command that repeats this demo, even if defaults change."""
        parts = [f"ottava demo --recipes {','.join(self.recipes)} --steps {self.steps} --seeds {self.seeds}"]
        parts += [f"--data {shlex.quote(self.data)}"] if self.data else []
        return " ".join([*parts, *(f"--set {shlex.quote(override)}" for override in self.overrides)])


class DemoFolder:
    """An opened folder: the settings, whether an earlier process began the demo, and `news` for the user."""

    def __init__(
        self,
        path: Path,
        settings: DemoSettings,
        *,
        resumed: bool,
        news: tuple[str, ...],
        lock: FolderLock | None = None,
    ) -> None:
        self.path = path
        self.lock = lock  # this object holds the folder as long as it lives
        self.settings = settings
        self.resumed = resumed
        self.news = news

    @classmethod
    def open(cls, path: Path, chosen: Mapping[str, Any], *, resume: bool = False, fresh: bool = False) -> DemoFolder:
        """Applies the table above.

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
        settings = replace(DemoSettings(), **chosen)
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
                expected = replace(saved, **chosen) if resume else settings
                if expected != saved:
                    raise ConfigError(_other_settings(path, saved, expected))
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
        values = {"schema_version": DEMO_VERSION, "finished": finished, "settings": asdict(self.settings)}
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
        return DemoSettings.from_dict(values["settings"]), bool(values["finished"])
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


def _other_settings(path: Path, saved: DemoSettings, expected: DemoSettings) -> str:
    old, new = asdict(saved), asdict(expected)
    changes = "; ".join(f"{name} was {old[name]!r}, now {new[name]!r}" for name in old if old[name] != new[name])
    return (
        f"{path}: holds an unfinished demo with other settings ({changes}). Continue it with --resume alone, discard "
        "it with --fresh, or give another folder with --run-dir"
    )
