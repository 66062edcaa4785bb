"""A study: recipes x seeds, each measured once, in a folder that keeps what is done.

    RUN/results/NAME-seedN-HASH.json     one measurement; the hash covers the recipe and all settings
    RUN/current/                         the training run of the moment
    RUN/lab.html

A measurement is written at its end, as a whole. A killed study therefore loses the seed that it was at, no more.

Beside a training run each measurement holds what one linear layer makes of the recipe: errors of its casts and of its
three GEMMs, on data of four kinds. The layer is an ordinary `nn.Linear` under the recipe, so transforms, kernels and
accumulators are those of training. Its operands are BF16 numbers, the truth is the fp64 product of these. Two draws
read the same operands with other random numbers of the recipe; e and e' are the errors of a result Y:

    error        |e| / |Y|
    systematic   <e, e'> / (|e| |e'|)     0 if two draws have no error in common: unbiased; 1: no chance in it
    shrink       -<e, Y> / <Y, Y>         the share that the result loses along itself; positive: it is too small

Y is rounded to BF16, so the recipe "bf16" shows what every other recipe has at least.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ottava.base import __version__
from ottava.base.files import replacing
from ottava.base.settings import ConfigError, read_yaml
from ottava.base.text import progress, to_json
from ottava.base.untrusted import parse_json, read_text
from ottava.measure.layer_names import symbol
from ottava.measure.observer import observe
from ottava.measure.tally import PARTS
from ottava.nn.convert import convert
from ottava.recipe import GEMMS, RECIPES, Recipe, bits, get_recipe
from ottava.train.config import DEMO_SETTINGS, TrainConfig, load_config
from ottava.train.loop import Trainer
from ottava.train.run_folder import FolderLock
from ottava.train.verdict import REFERENCE, has_diverged

_TURN = 4  # steps between two looks at the clock
_QUICK = ("sequence_length=32", "batch_size=8", "evaluation.batches=4")


@dataclass(frozen=True, kw_only=True)
class LabSettings:
    """What decides the numbers of a study."""

    recipes: tuple[Recipe, ...]
    """BF16 is always there, first."""
    seeds: int = 5
    steps: int = 120
    """Training steps of the demo's model."""
    quick: bool = False
    """Shorter sequences, smaller batches and evaluations."""

    def __post_init__(self) -> None:
        if not self.recipes:
            raise ConfigError(f"lab: no recipe; name some of {', '.join(RECIPES)}, or YAML files of recipes")
        names = [recipe.name for recipe in self.recipes]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"lab: two recipes are named {name!r}; give each its own name (field `name`)")
        for recipe in self.recipes:
            if recipe.name == REFERENCE and recipe != RECIPES[REFERENCE]:
                raise ConfigError("lab: a recipe of your own is named 'bf16', which all are compared with; rename it")
        if self.seeds < 1:
            raise ConfigError(f"--seeds {self.seeds}: needed: 1 or more; from 2 on differences have an interval")
        if self.steps < 1:
            raise ConfigError(f"--steps {self.steps}: needed: 1 or more")
        for recipe in self.all:
            self.config(recipe, 0)

    @cached_property
    def all(self) -> tuple[Recipe, ...]:
        """BF16, then the others."""
        return (RECIPES[REFERENCE], *(recipe for recipe in self.recipes if recipe.name != REFERENCE))

    def config(self, recipe: Recipe, seed: int) -> TrainConfig:
        """The settings of one training run."""
        values = (f"recipe={json.dumps(recipe.to_dict())}", f"seed={seed}", f"steps={self.steps}")
        last = ("evaluation.every=0", "checkpoint.every=0", "evaluation.batches=16")
        return load_config(None, [*DEMO_SETTINGS, *last, *(_QUICK if self.quick else ()), *values])

    def key(self, recipe: Recipe, seed: int) -> str:
        """The hash of all that decides a measurement, the versions too."""
        facts = [self.config(recipe, seed).digest(), self.quick, __version__, torch.__version__]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def read_recipe(text: str) -> Recipe:
    """The recipe of a name, or of a YAML file that holds what `Recipe.to_dict` gives; without `name`, the file's.

    Raises:
        ConfigError: no such file, or the file is no mapping.  ValueError, TypeError: an unknown name, key or value.

    Example:
        >>> read_recipe("mxfp8").name
        'mxfp8'
    """
    path = Path(text)
    if path.suffix not in (".yaml", ".yml"):
        return get_recipe(text)
    if not (values := read_yaml(path)):
        raise ConfigError(
            f"{path}: is empty; needs a recipe such as `fprop: {{lhs: {{format: E4M3}}, rhs: {{format: E4M3}}}}`"
        )
    try:
        return Recipe.from_dict({"name": path.stem, **values})
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One recipe with one seed."""

    recipe: str
    seed: int
    casts: dict[str, Any]
    """See `measured`."""
    losses: Sequence[float]
    """Training loss of each step, nats per byte."""
    validation: float
    """Loss on held-out text after the last step; NaN if the run diverged."""
    seconds_per_step: float
    """Median."""

    @property
    def diverged(self) -> bool:
        """Whether training failed."""
        return has_diverged(self.validation)


class Study:
    """A study in a folder, which it holds until it ends.

    Raises:
        ConfigError: another process has the folder, or it holds something else.
    """

    def __init__(self, settings: LabSettings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.lock = FolderLock(folder)
        with self.lock.released_on_error():
            strange = [p.name for p in folder.iterdir() if p.name not in ("results", "current", "lab.html", ".lock")]
            if strange:
                found = ", ".join(sorted(strange)[:3])
                raise ConfigError(f"{folder}: holds {found}, which is no study's; give another folder with --run-dir")
            shutil.rmtree(folder / "current", ignore_errors=True)
            (folder / "results").mkdir(exist_ok=True)

    def tasks(self) -> list[tuple[Recipe, int]]:
        """Every recipe and seed, seed by seed, so that a stopped study has whole pairs."""
        return [(recipe, seed) for seed in range(self.settings.seeds) for recipe in self.settings.all]

    def path(self, recipe: Recipe, seed: int) -> Path:
        """The file of a measurement."""
        name = re.sub(r"[^\w.-]+", "-", recipe.name)
        return self.folder / "results" / f"{name}-seed{seed}-{self.settings.key(recipe, seed)}.json"

    def done(self) -> dict[tuple[str, int], Measurement]:
        """The finished measurements of these settings, by recipe and seed. A damaged file counts as unfinished."""
        found = {}
        for recipe, seed in self.tasks():
            with suppress(OSError, ValueError, TypeError, KeyError):
                values = parse_json(read_text(self.path(recipe, seed)))
                found[recipe.name, seed] = Measurement(**_numbers(values))
        return found

    def run(self, stopping: Callable[[], object]) -> bool:
        """Measures what is missing; returns whether all is there. `stopping()` ends it between steps."""
        done = self.done()
        missing = [task for task in self.tasks() if (task[0].name, task[1]) not in done]
        steps = progress(range(len(missing) * self.settings.steps), "training steps")
        with closing(steps):
            for recipe, seed in missing:
                one = self._measure(recipe, seed, steps, stopping)
                if one is None:
                    return False
                with replacing(self.path(recipe, seed)) as unfinished:
                    unfinished.write_text(to_json(asdict(one)), encoding="utf-8")
        return True

    def _measure(
        self, recipe: Recipe, seed: int, steps: Iterator[int], stopping: Callable[[], object]
    ) -> Measurement | None:
        """None: somebody asked to stop."""
        work = self.folder / "current"
        trainer = Trainer(self.settings.config(recipe, seed), work)
        try:
            while not trainer.done:
                if stopping():
                    return None
                for _ in trainer.advance(_TURN):
                    next(steps)
            history = trainer.history
            lost = trainer.diverged or history[-1].val_loss is None
        finally:
            trainer.close()
            shutil.rmtree(work, ignore_errors=True)
        return Measurement(
            recipe=recipe.name,
            seed=seed,
            casts=measured(recipe, seed),
            losses=[record.loss for record in history],
            validation=float("nan") if lost else history[-1].val_loss,  # type: ignore[arg-type]
            seconds_per_step=statistics.median(r.seconds for r in history[min(3, len(history) - 1) :]),
        )


def _numbers(value: Any) -> Any:
    """JSON's null as NaN, at any depth."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float("nan") if value is None else value


def operand_bits(recipe: Recipe) -> Iterator[float]:
    """`bits` of the six cells."""
    for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad):
        yield from (bits(gemm.lhs), bits(gemm.rhs))


# --- one linear layer under a recipe ---------------------------------------------------------------------------------

TOKENS, FEATURES = 256, 256
_HUGE_CHANNELS, _HUGE = 4, 50.0
DISTRIBUTIONS: Mapping[str, str] = MappingProxyType(
    {
        "normal": "N(0, 1)",
        "heavy-tailed": "Student's t with 3 degrees of freedom",
        "channel outlier": f"N(0, 1), {_HUGE_CHANNELS} of {FEATURES} channels times {_HUGE:g}",
        "gradient-like": "N(0, 1) times exp(2 g) for each token, g from N(0, 1), times 2**-14",
    }
)
"""What x and dy are drawn from; w is N(0, 1 / features)."""
OPERAND: Mapping[str, str] = MappingProxyType({name: "dY" if "gradient" in name else "X" for name in DISTRIBUTIONS})
"""The operand that a distribution is about."""


def drawn(name: str, generator: torch.Generator) -> Tensor:
    """A matrix (TOKENS, FEATURES) in BF16 of one of DISTRIBUTIONS.

    Example:
        >>> x = drawn("channel outlier", torch.Generator().manual_seed(0))
        >>> x.shape, bool(x.abs().amax() > 100)
        (torch.Size([256, 256]), True)
    """
    x = torch.randn(TOKENS, FEATURES, generator=generator)
    if name == "heavy-tailed":
        chi = torch.randn(3, TOKENS, FEATURES, generator=generator).square().mean(0)
        x = x / chi.sqrt()
    elif name == "channel outlier":
        x[:, torch.randperm(FEATURES, generator=generator)[:_HUGE_CHANNELS]] *= _HUGE
    elif name == "gradient-like":
        x = x * (2 * torch.randn(TOKENS, 1, generator=generator)).exp() * 2.0**-14
    return x.to(torch.bfloat16)


def measured(recipe: Recipe, seed: int) -> dict[str, Any]:
    """Errors by distribution: {"casts": {operand: {...}}, "gemms": {GEMM: {...}}}; see the module.

    Overrides of the recipe name layers of a model, so this layer takes the recipe's own cells.
    """
    return {name: _measured(replace(recipe, overrides=()), name, seed, i) for i, name in enumerate(DISTRIBUTIONS)}


def _measured(recipe: Recipe, name: str, seed: int, index: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(len(DISTRIBUTIONS) * seed + index)
    x, dy = drawn(name, generator), drawn(name, generator)
    layer = nn.Linear(FEATURES, FEATURES, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(FEATURES, FEATURES, generator=generator) * FEATURES**-0.5)
    w64, x64, dy64 = (t.detach().double() for t in (layer.weight, x, dy))
    convert(layer, recipe, filter=lambda *_: True)
    exact = {"fprop": x64 @ w64.t(), "dgrad": dy64 @ w64, "wgrad": dy64.t() @ x64}
    torch.manual_seed(2 * seed)  # the generator of a CPU looks at the low 32 bits only
    with observe(layer, detail="anatomy") as seen:
        first = _results(layer, x, dy)
    torch.manual_seed(2 * seed + 1)
    second = _results(layer, x, dy)
    casts = {symbol(row["tensor"], row["direction"]): _cast(row) for row in seen.table()}
    gemms = {gemm: compared(first[gemm], second[gemm], exact[gemm]) for gemm in GEMMS}
    return {"casts": casts, "gemms": gemms}


def _results(layer: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The three results in fp64."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    (w,) = layer.parameters()
    assert x.grad is not None
    assert w.grad is not None
    return {"fprop": y.detach().double(), "dgrad": x.grad.double(), "wgrad": w.grad.double()}


def _cast(row: Mapping[str, Any]) -> dict[str, float]:
    return {"sqnr_db": row["sqnr_db"], **{part: row[f"error_{part}_pct"] for part in PARTS}}


def compared(first: Tensor, second: Tensor, exact: Tensor) -> dict[str, float]:
    """error, systematic and shrink of two draws of a result.

    Example:
        >>> exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
        >>> compared(exact * 0.9, exact * 0.9, exact)
        {'error': 0.1, 'systematic': 1.0, 'shrink': 0.1}
    """
    e, other = first - exact, second - exact
    size, norms = float(exact.square().sum()), float(e.norm()) * float(other.norm())
    return {
        "error": round(math.sqrt(float(e.square().sum()) / size), 12),
        "systematic": round(float((e * other).sum()) / norms, 12) if norms else 0.0,
        "shrink": round(-float((e * exact).sum()) / size, 12),
    }
