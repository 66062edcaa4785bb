"""Settings of a watch. The defaults cost little and see trouble; an empty file is a valid one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_serializer

from ottava.attention_recipe import ATTENTION_TENSORS
from ottava.debug import limits
from ottava.debug.run.schema import SYMBOLS
from ottava.debug.tally import Detail
from ottava.errors import unknown_name
from ottava.recipe import Recipe, get_recipe
from ottava.settings import ConfigError, Count, Positive, Section, read_yaml

EVERY = 50


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, (str, Recipe)) else value


def _known_recipe(recipe: Any) -> Any:
    try:
        get_recipe(recipe)
    except TypeError as error:  # pydantic collects only ValueError
        raise ValueError(str(error)) from error
    return recipe


def tensor_names(names: Iterable[str]) -> tuple[str, ...]:
    """Long names for long names or symbols.

    Raises:
        ValueError: neither.

    Example:
        >>> tensor_names(["X", "grad_output"])
        ('input', 'grad_output')
    """
    by_symbol = {symbol: name for name, symbol in SYMBOLS.items()}
    found = tuple(by_symbol.get(name, name) for name in names)
    for name in found:
        if name not in SYMBOLS:
            raise ValueError(unknown_name("tensor", name, [*SYMBOLS, *by_symbol]))
    return found


Patterns = Annotated[tuple[str, ...], BeforeValidator(_several)]
Tensors = Annotated[tuple[str, ...], BeforeValidator(_several), AfterValidator(tensor_names)]
Recipes = Annotated[tuple[Annotated[Any, AfterValidator(_known_recipe)], ...], BeforeValidator(_several)]
Sinks = Annotated[tuple[Any, ...], BeforeValidator(_several)]


class Triggers(Section):
    """What makes the watch look at every step for a while, and puts the steps before on record."""

    loss_z: float | None = 6.0
    """A loss so many robust standard deviations above the median of the last 64; None: never."""
    clipping: float | None = 1e-3
    """Share of the elements of a cast that were clipped. FP8-LM (arXiv 2310.18313) takes 1e-5 as too many already."""
    row_sqnr_db: float | None = limits.NOISE_DB
    """SQNR of the median row below which a cast is mostly noise."""
    nonfinite: bool = True
    """An infinity or NaN in a tensor, or a loss that is not finite."""
    burst: Count = 16
    """Steps looked at in full after a trigger."""
    cooldown: Count = 500
    """Steps from one burst to the next, at least."""


class DumpConfig(Section):
    """Which tensors are written out as they are."""

    steps: tuple[Positive, ...] = ()
    """In these steps, the tensors of `layers` and `tensors`."""
    layers: Patterns = ()
    """Shell patterns over full layer names."""
    tensors: Tensors = ("input", "weight", "grad_output")
    """Long names or symbols."""
    on_trigger: Count = 0
    """After a trigger, so many tensors of the lowest row SQNR."""
    rows: Count = 256
    """Rows of the original kept beside the codes."""
    quota_gb: Annotated[float, Field(ge=0.0, le=1e6)] = 2.0
    """Of the run folder."""


class WatchConfig(Section):
    """What is watched, and when.

    Raises:
        ConfigError: an unknown field, or a value that is not offered.

    Example:
        >>> config = WatchConfig(tensors=("X", "dY"), every=10)
        >>> config.tensors, config.watches("layers.3.fc2", "input")
        (('input', 'grad_output'), True)
    """

    layers: Annotated[Patterns, Field(min_length=1)] = ("*",)
    """Shell patterns over full layer names, as in `Recipe.override`. One that matches no layer is an error."""
    tensors: Tensors = ("input", "weight", "grad_output", *ATTENTION_TENSORS)
    """Long names or symbols: X W dY, and Y dX dW; of FP8 attention QKV S O dO dP dQKV."""
    recipes: Recipes = ("tensorwise",)
    """Simulated for layers whose GEMMs are not ours. Layers of ottava show what they really cast."""
    every: Positive | None = None
    """Steps from one full look to the next; also step 1, 2, 4, 8, ... up to it. None: 50, and less often, amaxes too,
    where watching takes more than `max_overhead`."""
    sample: Positive = 16
    """One row in so many is measured, and at least 32 of a tensor; others at every look. 1: all of them."""
    detail: Detail = "blocks"
    """How elements are spread: "numbers" records nothing of it, at a fifth of the price; "exponents" how many there are
    of each magnitude; "blocks" also how far they lie below the amax of their block, for every block size, which what-if
    needs."""
    light: bool = True
    """amax of inputs and gradients in every step, in a ring that triggers put on record."""
    flight: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Noted steps in that ring."""
    triggers: Triggers = Field(default_factory=Triggers)
    dump: DumpConfig = Field(default_factory=DumpConfig)
    sinks: Sinks = ()
    """Where numbers go besides the run folder: "terminal", "tensorboard", "wandb", "trackio", see `sinks`."""
    compiled: Literal["warn", "eager"] = "warn"
    """Compiled code calls no hooks. "warn": say what is not seen. "eager": steps that are looked at run uncompiled,
    which may change their last bits."""
    loss: Literal["mean", "sum"] = "mean"
    """A step's loss of what backward() is called on in its micro-batches. "sum": of loops that divide each by their
    number, or by the tokens of the step, as Hugging Face's Trainer does."""
    max_overhead: Annotated[float, Field(ge=0.0, le=1.0)] = 0.03
    """Share of the run's time that watching may take where `every` is None."""

    @field_serializer("recipes")
    def _names(self, recipes: tuple[str | Recipe, ...]) -> list[str]:
        return [get_recipe(recipe).name for recipe in recipes]

    @classmethod
    def load(cls, source: WatchConfig | Mapping[str, Any] | Path | str | None, **settings: Any) -> Self:
        """From a YAML file, a mapping or nothing; `settings` have the last word.

        Raises:
            ConfigError: no such file, not a mapping, or a setting that is wrong.
        """
        path = Path(source) if isinstance(source, (str, Path)) else None
        tree = read_yaml(path) if path else {} if source is None else source
        if not isinstance(tree, (Mapping, WatchConfig)):
            raise ConfigError(f"watch: got {type(tree).__name__}; needed: a mapping of settings, or a YAML file of it")
        return cls.checked({**dict(tree), **settings}, path)

    def watches(self, layer: str, tensor: str) -> bool:
        """Whether that tensor of the layer of that full name is asked for."""
        return tensor in self.tensors and matches(layer, self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `WatchConfig.load` gives equal settings back, if all recipes are registered ones."""
        return self.model_dump()


def matches(layer: str, patterns: Iterable[str]) -> bool:
    """Whether a full layer name fits one of these shell patterns."""
    return any(fnmatchcase(layer, pattern) for pattern in patterns)
