"""Settings of a watch. The defaults cost little and catch common trouble; an empty file is valid."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_serializer

from ottava.base.settings import ConfigError, Count, Positive, Section, read_yaml
from ottava.measure import limits
from ottava.measure.layer_names import matches, tensor_names, usable
from ottava.measure.tally import Detail
from ottava.recipe import ATTENTION_TENSORS, Recipe, get_recipe

EVERY = 50


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, (str, Recipe)) else value


def _known_recipe(recipe: Any) -> Any:
    try:
        get_recipe(recipe)
    except TypeError as error:  # pydantic collects only ValueError
        raise ValueError(str(error)) from error
    return recipe


def _forward(ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    for first, last in ranges:
        if first > last:
            raise ValueError(f"[{first}, {last}] is no range of steps: its first step is behind its last")
    return ranges


Patterns = Annotated[tuple[str, ...], BeforeValidator(_several), AfterValidator(usable)]
Tensors = Annotated[tuple[str, ...], BeforeValidator(_several), AfterValidator(tensor_names)]
Recipes = Annotated[tuple[Annotated[Any, AfterValidator(_known_recipe)], ...], BeforeValidator(_several)]
Sinks = Annotated[tuple[Any, ...], BeforeValidator(_several)]


class Triggers(Section):
    """Conditions that make the watch look at every step for a while and store the amaxes of the steps before."""

    loss_z: float | None = 6.0
    """The loss is so many robust standard deviations above the median of the last 32 losses; None: never."""
    clipping: float | None = 1e-3
    """The cast clips a larger share of its elements. FP8-LM (arXiv 2310.18313) calls 1e-5 too many."""
    row_sqnr_db: float | None = limits.NOISE_DB
    """The SQNR of the median row is lower: such a cast is mostly noise."""
    nonfinite: bool = True
    """A tensor has an infinity or NaN, or the loss is not finite."""
    scale_error: float | None = 4.0
    """A predicted scale is so many octaves above or below the current one."""
    scale_drift: float | None = 8.0
    """The scale that a tensor's amax asks for is so many octaves from the median of its last 16 looks."""
    history: bool = True
    """A history is saturated: it predicts a scale at the end of fp32's range."""
    burst: Count = 16
    """Length of a burst: steps after a trigger that all get a full look."""
    cooldown: Count = 500
    """Smallest distance of two bursts in steps."""


class Period(Section):
    """Some tensors in some steps."""

    layers: Annotated[Patterns, Field(min_length=1)] = ("*",)
    tensors: Tensors = ("input", "weight", "grad_output")
    every: Positive = 1
    """Every so many steps, counted from `zero`."""
    ranges: Annotated[tuple[tuple[Count, Count], ...], AfterValidator(_forward)] = ()
    """First and last step of each range; none: every step."""
    zero: Literal[0, 1] = 0
    """The step of ours that is step 0 here. 1: TransformerEngine's iteration 0 is our first step."""

    def chooses(self, step: int) -> bool:
        """Whether the period has this step.

        Example:
            >>> period = Period(every=10, ranges=((0, 20), (90, 100)))
            >>> [step for step in range(1, 200) if period.chooses(step)]
            [10, 20, 90, 100]
        """
        step -= self.zero
        return step % self.every == 0 and (not self.ranges or any(a <= step <= b for a, b in self.ranges))

    def has(self, layer: str, tensor: str) -> bool:
        """Whether the period has this tensor of the layer with this full name."""
        return tensor in self.tensors and matches(layer, self.layers)


class Intervention(Section):
    """Casts of some layers of ours that run in another way; the only part of a watch that changes the training."""

    layers: Annotated[Patterns, Field(min_length=1)] = ("*",)
    gemms: tuple[Literal["fprop", "dgrad", "wgrad"], ...] = ("fprop", "dgrad", "wgrad")
    tensors: Tensors = ("input", "weight", "grad_output")
    """For "fake" and "current": the operands that are cast so; the other operands stay as they are for "current", and
    in high precision for "fake"."""
    action: Literal["high_precision", "fake", "current"]
    """"high_precision": no cast. "fake": casts, and a GEMM in BF16 on the decoded codes. "current": one scale a tensor
    from its present amax and without a margin, in place of a predicted one."""
    format: Literal["E4M3", "E5M2"] = "E4M3"
    """Of "fake"."""


class Cure(Section):
    """A remedy to try, made from outside while a script trains, see `remedy.cure`; `diagnose` names it as `trial`."""

    layers: Patterns = ("*",)
    """Of `recipe`: shell patterns over full layer names."""
    recipe: str | None = None
    """The recipe of these layers; torchao's know "bf16" only."""
    sites: tuple[str, ...] = ()
    """Conversions of the script's own that lose nothing: FILE:LINE, or with the caller as `diagnose` names it."""
    derivatives: bool = False
    """Functions of autograd around conversions take the derivative of their forward."""
    lr: Annotated[float, Field(gt=0.0)] = 1.0
    """A factor for all learning rates."""
    schedule: tuple[float | tuple[float, ...], ...] = ()
    """The learning rate of each step, from the first on: that of every group, or the largest, and the others keep their
    ratio to it."""
    settings: dict[str, float] = Field(default_factory=dict)
    """Other settings of the optimizer: weight_decay, eps, momentum, beta1, beta2."""
    clear: bool = False
    """No gradient is left behind a step."""
    train: bool = False
    """Models are in training mode after every step."""
    hold: bool = False
    """The optimizer gets parameters that have a gradient and no optimizer."""
    load: bool = False
    """A checkpoint of which no name fits gets the model's names."""


class DumpConfig(Section):
    """Which tensors a watch writes to files."""

    steps: tuple[Positive, ...] = ()
    """Steps in which to write the tensors of `layers` and `tensors`."""
    periods: tuple[Period, ...] = ()
    """Other tensors, in other steps."""
    layers: Patterns = ()
    """Shell patterns over full layer names."""
    tensors: Tensors = ("input", "weight", "grad_output")
    """Long names or symbols."""
    on_trigger: Count = 0
    """Number of tensors to write after a trigger, those with the lowest row SQNR."""
    rows: Count = 256
    """Rows of the tensor before the cast to write beside the codes."""
    quota_gb: Annotated[float, Field(ge=0.0, le=1e6)] = 2.0
    """Largest size of all dumps in the run folder."""


class WatchConfig(Section):
    """Which casts a watch measures, and when.

    Raises:
        ConfigError: a field or its value is unknown.

    Example:
        >>> config = WatchConfig(tensors=("X", "dY"), every=10)
        >>> config.tensors, config.watches("layers.3.fc2", "input")
        (('input', 'grad_output'), True)
    """

    layers: Annotated[Patterns, Field(min_length=1)] = ("*",)
    """Shell patterns over full layer names, as in `Recipe.override`; or "re:" and a regular expression, found
    anywhere in the name. A pattern that matches no layer is an error."""
    tensors: Tensors = ("input", "weight", "grad_output", *ATTENTION_TENSORS)
    """Long names or symbols: X W dY, and Y dX dW; of FP8 attention QKV S O dO dP dQKV."""
    recipes: Recipes = ("tensorwise",)
    """Recipes to simulate for layers of other packages. Ottava's own layers show their real casts."""
    every: Positive | None = None
    """Steps from one full look to the next; steps 1, 2, 4, 8, ... before it get one too. None: 50, and larger (for
    amaxes too) if watching takes more than `max_overhead`."""
    looks: tuple[Period, ...] = ()
    """Full looks at some tensors in some steps, in place of those of `every`; a burst after a trigger looks at all."""
    interventions: tuple[Intervention, ...] = ()
    """Casts to change while the watch goes on."""
    cure: Cure | None = None
    """A remedy to try."""
    sample: Positive = 16
    """A look measures one row in `sample`, but at least 32 rows of a tensor; the rows change from look to look. 1: all
    rows."""
    detail: Detail = "blocks"
    """Histograms of elements. "numbers": none, at a fifth of the cost. "exponents": magnitudes. "blocks": magnitudes,
    and distances below the amax of the element's block for every block size; what-if needs them. "anatomy": also the
    parts of each error (`measure.walk.anatomy`), at about five times the cost of "blocks"."""
    light: bool = True
    """Note the amax of inputs and gradients in every step, in a ring that a trigger writes to the run folder."""
    flight: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Steps in that ring."""
    shadow: Count = 100
    """Steps from one shadow step to the next, see `experiments`: the gradient with casts and without. 0: none."""
    replay: Count = 0
    """Steps from one snapshot of model and optimizer to the next: if the loss leaves its noise, the steps since run
    again as they ran, in high precision and under remedies. 0: none, because a snapshot is a copy on the CPU."""
    triggers: Triggers = Field(default_factory=Triggers)
    dump: DumpConfig = Field(default_factory=DumpConfig)
    sinks: Sinks = ()
    """Places besides the run folder: "terminal", "live", "tensorboard", "wandb", "trackio", see `sinks`."""
    batches: bool = True
    """Hash the inputs and labels of every batch, so that `compare` can tell whether two runs saw the same data."""
    compiled: Literal["warn", "eager"] = "warn"
    """Compiled code calls no hooks. "warn": warn about layers that are not seen. "eager": run steps with a full look
    uncompiled, which may change their last bits."""
    loss: Literal["auto", "mean", "sum"] = "auto"
    """How the losses of micro-batches make the loss of a step. "sum" is for loops that divide each loss by the number
    of micro-batches or by the tokens of the step, as Hugging Face's Trainer does. "auto" reads the division in the
    graph of the loss, and takes the mean where it sees none."""
    notes: tuple[str, ...] = ()
    """Parts of another tool's configuration that this watch cannot do; it repeats them as warnings."""
    max_overhead: Annotated[float, Field(ge=0.0, le=1.0)] = 0.03
    """Largest share of the run's time for watching; only if `every` is None. Shadow steps get as much again, at most
    2 %. What happens after a trigger is not held back."""
    early: bool = True
    """The looks at steps 2, 4, 8, ... and the shadow step 10 come whatever they cost; those of 20, 80, 320 and 1,280,
    if one takes less than a second. False: after the first look and the first shadow step, none that `max_overhead`
    has not paid for. Where the facts of a step cost more than that, the steps between have their loss and their time
    only."""

    @field_serializer("recipes")
    def _names(self, recipes: tuple[str | Recipe, ...]) -> list[str]:
        return [get_recipe(recipe).name for recipe in recipes]

    @classmethod
    def load(cls, source: WatchConfig | Mapping[str, Any] | Path | str | None, **settings: Any) -> Self:
        """Settings from a YAML file, a mapping or the defaults; `settings` override them. A configuration of
        TransformerEngine's debug tool (nvdlfw_inspect) is read as well, see `te_config`.

        Raises:
            ConfigError: the file is missing, is no mapping, or has a wrong setting.
        """
        from ottava.interop.te_config import is_te_config, read_te_config

        path = Path(source) if isinstance(source, (str, Path)) else None
        tree = read_yaml(path) if path else {} if source is None else source
        if isinstance(tree, Mapping) and is_te_config(tree):
            tree = read_te_config(tree)
        if not isinstance(tree, (Mapping, WatchConfig)):
            raise ConfigError(f"watch: got {type(tree).__name__}; needs a mapping of settings, or a YAML file of it")
        return cls.checked({**dict(tree), **settings}, path)

    def watches(self, layer: str, tensor: str) -> bool:
        """Whether the settings ask for this tensor of the layer with this full name."""
        return tensor in self.tensors and matches(layer, self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `WatchConfig.load` turns them into equal settings if all recipes are registered."""
        return self.model_dump()
