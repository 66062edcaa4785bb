"""Settings of a watch. The defaults cost little and see trouble; an empty file is a valid one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, Self, get_args

import yaml

from ottava.debug.run.schema import SYMBOLS
from ottava.debug.tally import DETAILS, Detail
from ottava.errors import RefusesUnknownFields, unknown_name
from ottava.recipe import Recipe, get_recipe

EVERY = 50
Compiled = Literal["warn", "eager"]
Loss = Literal["mean", "sum"]


class WatchConfigError(ValueError):
    """A setting of the watch is wrong; the message names it."""

    exit_code = 2


@dataclass(frozen=True)
class Triggers(RefusesUnknownFields):
    """What makes the watch look at every step for a while, and puts the steps before on record."""

    loss_z: float | None = 6.0
    """A loss so many robust standard deviations above the median of the last 64; None: never."""
    clipping: float | None = 1e-3
    """Share of the elements of a cast that were clipped. FP8-LM (arXiv 2310.18313) takes 1e-5 as too many already."""
    row_sqnr_db: float | None = 12.0
    """SQNR of the median row below which a cast is mostly noise."""
    nonfinite: bool = True
    """An infinity or NaN in a tensor, or a loss that is not finite."""
    burst: int = 16
    """Steps looked at in full after a trigger."""
    cooldown: int = 500
    """Steps from one burst to the next, at least."""


@dataclass(frozen=True)
class DumpConfig(RefusesUnknownFields):
    """Which tensors are written out as they are."""

    steps: tuple[int, ...] = ()
    """In these steps, the tensors of `layers` and `tensors`."""
    layers: tuple[str, ...] = ()
    """Shell patterns over full layer names."""
    tensors: tuple[str, ...] = ("input", "weight", "grad_output")
    """Long names or symbols."""
    on_trigger: int = 0
    """After a trigger, so many tensors of the lowest row SQNR."""
    rows: int = 256
    """Rows of the original kept beside the codes."""
    quota_gb: float = 2.0
    """Of the run folder."""


@dataclass(frozen=True)
class WatchConfig(RefusesUnknownFields):
    """What is watched, and when.

    Raises:
        WatchConfigError: a value that is not offered.  TypeError: an unknown field.

    Example:
        >>> config = WatchConfig(tensors=("X", "dY"), every=10)
        >>> config.tensors, config.watches("layers.3.fc2", "input")
        (('input', 'grad_output'), True)
    """

    layers: tuple[str, ...] = ("*",)
    """Shell patterns over full layer names, as in `Recipe.override`. One that matches no layer is an error."""
    tensors: tuple[str, ...] = ("input", "weight", "grad_output")
    """Long names or symbols: X W dY, and Y dX dW."""
    recipes: tuple[str | Recipe, ...] = ("tensorwise",)
    """Simulated for layers whose GEMMs are not ours. Layers of ottava show what they really cast."""
    every: int | None = None
    """Steps from one full look to the next; also step 1, 2, 4, 8, ... up to it. None: 50, and less often, amaxes too,
    where watching takes more than `max_overhead`."""
    sample: int = 16
    """One row in so many is measured, and at least 32 of a tensor; others at every look. 1: all of them."""
    detail: Detail = "blocks"
    """How elements are spread: "numbers" records nothing of it, at a fifth of the price; "exponents" how many there are
    of each magnitude; "blocks" also how far they lie below the amax of their block, for every block size, which what-if
    needs."""
    light: bool = True
    """amax of inputs and gradients in every step, in a ring that triggers put on record."""
    flight: int = 64
    """Noted steps in that ring."""
    triggers: Triggers = field(default_factory=Triggers)
    dump: DumpConfig = field(default_factory=DumpConfig)
    sinks: tuple[Any, ...] = ()
    """Where numbers go besides the run folder: "terminal", "tensorboard", "wandb", "trackio", see `sinks`."""
    compiled: Compiled = "warn"
    """Compiled code calls no hooks. "warn": say what is not seen. "eager": steps that are looked at run uncompiled,
    which may change their last bits."""
    loss: Loss = "mean"
    """A step's loss of what backward() is called on in its micro-batches. "sum": of loops that divide each by their
    number, or by the tokens of the step, as Hugging Face's Trainer does."""
    max_overhead: float = 0.03
    """Share of the run's time that watching may take where `every` is None."""

    def __post_init__(self) -> None:
        def refuse(text: str) -> None:
            raise WatchConfigError(f"watch: {text}")

        for name in ("layers", "tensors", "recipes", "sinks"):
            object.__setattr__(self, name, _several(getattr(self, name)))
        object.__setattr__(self, "tensors", tensor_names(self.tensors))
        for name, kind in (("triggers", Triggers), ("dump", DumpConfig)):
            if isinstance(value := getattr(self, name), Mapping):
                object.__setattr__(self, name, kind(**value))
        for recipe in self.recipes:
            get_recipe(recipe)
        for name, least in (("every", 1), ("sample", 1), ("flight", 1)):
            if name == "every" and self.every is None:
                continue
            if not isinstance(getattr(self, name), int) or getattr(self, name) < least:
                refuse(f"{name} is {getattr(self, name)!r}; needs a whole number of at least {least}")
        for name, offered in (("detail", DETAILS), ("compiled", get_args(Compiled)), ("loss", get_args(Loss))):
            if getattr(self, name) not in offered:
                refuse(unknown_name(f"value of {name}", getattr(self, name), offered))
        if not self.layers:
            refuse("layers is empty; needs patterns of layer names, such as '*'")
        dump = self.dump
        patterns, names = _several(dump.layers), tensor_names(_several(dump.tensors))
        object.__setattr__(self, "dump", replace(dump, layers=patterns, tensors=names, steps=tuple(dump.steps)))

    @classmethod
    def load(cls, source: WatchConfig | Mapping[str, Any] | Path | str | None, **settings: Any) -> Self:
        """From a YAML file, a mapping or nothing; `settings` have the last word.

        Raises:
            WatchConfigError: no such file, or not a mapping.
        """
        if isinstance(source, WatchConfig):
            return replace(source, **settings)  # type: ignore[return-value]
        values: Any = source
        if isinstance(source, (str, Path)):
            try:
                values = yaml.safe_load(Path(source).read_text(encoding="utf-8"))
            except (OSError, yaml.YAMLError) as error:
                raise WatchConfigError(f"watch: cannot read the settings in {source}: {error}") from error
        if values is not None and not isinstance(values, Mapping):
            raise WatchConfigError(f"watch: {source} holds {type(values).__name__}; needs a mapping of settings")
        return cls(**{**(values or {}), **settings})

    def watches(self, layer: str, tensor: str) -> bool:
        """Whether that tensor of the layer of that full name is asked for."""
        return tensor in self.tensors and matches(layer, self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `WatchConfig.load` gives equal settings back, if all recipes are registered ones."""
        return asdict(self) | {"recipes": [get_recipe(recipe).name for recipe in self.recipes]}


def _several(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, (str, Recipe)) else tuple(value)


def tensor_names(names: Iterable[str]) -> tuple[str, ...]:
    """Long names for long names or symbols.

    Raises:
        WatchConfigError: neither.

    Example:
        >>> tensor_names(["X", "grad_output"])
        ('input', 'grad_output')
    """
    by_symbol = {symbol: name for name, symbol in SYMBOLS.items()}
    found = tuple(by_symbol.get(name, name) for name in names)
    for name in found:
        if name not in SYMBOLS:
            raise WatchConfigError(f"watch: {unknown_name('tensor', name, [*SYMBOLS, *by_symbol])}")
    return found


def matches(layer: str, patterns: Iterable[str]) -> bool:
    """Whether a full layer name fits one of these shell patterns."""
    return any(fnmatchcase(layer, pattern) for pattern in patterns)
