"""The settings of a training run: one frozen, typed tree, read from YAML and from `a.b=c` on the command line.

Every key has a default, so an empty file is a valid run. Every key is checked, so a typo is an error that names the
nearest key. The run folder keeps the resolved tree as config.yaml.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, Field, field_validator, model_validator

from ottava.base.settings import Positive, Section, apply_override, read_yaml
from ottava.numerics.accumulator import get_accumulator
from ottava.recipe import Recipe, get_recipe
from ottava.watching.config import WatchConfig

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


def absolute(path: Path | None) -> Path | None:
    """The absolute path, for the saved config: a user may resume the run from another folder."""
    try:
        return None if path is None else path.expanduser().absolute()
    except RuntimeError:
        name = path.parts[0] if path else ""
        raise ValueError(
            f"{path}: there is no user {name[1:]!r}, whose home {name} would be; write ./{path} for a file of that name"
        ) from None


def _a_device(device: str) -> str:
    kind, _, index = device.partition(":")
    if device not in ("auto", "cpu", "cuda") and not (kind == "cuda" and index.isdecimal()):
        raise ValueError(f"got {device!r}; needed: auto, cpu, cuda or cuda:N")
    return device


Absolute = Annotated[Path | None, AfterValidator(absolute)]


class ModelConfig(Section):
    """The Llama-style byte model, or Mixtral-style with experts; the defaults have 1,049,984 parameters."""

    d_model: Positive = 128
    """Width of the residual stream."""
    layers: Positive = 5
    heads: Positive = 4
    """Query heads. d_model must be a multiple of them, and their width even (rotary positions turn pairs)."""
    kv_heads: Positive = 2
    """Key and value heads, each shared by heads / kv_heads query heads."""
    ffn: Positive = 384
    """Inner width of the SwiGLU, or of each expert's SwiGLU."""
    experts: Annotated[int, Field(ge=0)] = 0
    """Experts in place of each layer's MLP; 0: one MLP for all tokens."""
    experts_per_token: Positive = 2
    aux_loss: Annotated[float, Field(ge=0.0)] = 0.01
    """Coefficient of the loss that balances the load of the experts (Switch Transformer)."""
    rope_theta: Annotated[float, Field(gt=0.0)] = 10_000.0
    norm_eps: Annotated[float, Field(gt=0.0)] = 1e-5

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.d_model % self.heads or (self.d_model // self.heads) % 2:
            raise ValueError(f"d_model {self.d_model} must be heads {self.heads} times an even number")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        if 0 < self.experts < self.experts_per_token:
            raise ValueError(f"experts is {self.experts}; needs at least experts_per_token, {self.experts_per_token}")
        return self

    @property
    def parameters(self) -> int:
        """Number of parameters, without building the model.

        Example:
            >>> ModelConfig().parameters
            1049984
        """
        attention = (2 * self.heads + 2 * self.kv_heads) * (self.d_model // self.heads) * self.d_model
        mlp = 3 * self.ffn * self.d_model
        block = attention + (self.experts * (mlp + self.d_model) if self.experts else mlp) + 2 * self.d_model
        return self.layers * block + self.d_model + 2 * 256 * self.d_model


class DataConfig(Section):
    """The text: its bytes are the tokens."""

    path: Absolute = None
    """A text file or a folder of them; null: the sources of Python's standard library."""
    validation_fraction: Annotated[float, Field(gt=0.0, le=0.5)] = 0.05
    """Share of the text to hold out for validation, in whole files if there are enough."""
    max_bytes: Positive | None = 16_000_000
    """Read at most this many bytes; null reads everything."""


class OptimizerConfig(Section):
    """The optimizer, and the storage of its states and of the weights; docs/memory.md compares the choices."""

    name: Literal["adamw", "lion", "muon", "sgd"] = "adamw"
    """muon updates matrices; AdamW updates the embedding, the head and the gains of norms."""
    weights: Literal["fp32", "bf16", "fp8"] = "fp32"
    """Storage of the parameters. fp8 stores the weights of FP8 layers as codes, and all other parameters in BF16."""
    master: Literal["fp32", "remainder"] | None = None
    """The master beside BF16 and FP8 weights; see `ottava.optim.AdamW`. null: none."""
    moments: Literal["fp32", "bf16", "fp8", "int8"] = "fp32"
    """Storage of the optimizer's states."""
    amax_every: Positive = 1
    """adamw measures the amax of an FP8 weight at every so many steps, and bounds it in between; see
    `ottava.optim.AdamW`."""
    stochastic_rounding: bool = False
    """Round BF16 weights without a master up or down at random."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 3e-3
    """The highest learning rate of the schedule."""
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (0.9, 0.95)
    """Decay rates of adamw's and lion's moments, and of the parameters that muon leaves to AdamW."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Decay rate of the momentum of muon and sgd."""
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """Applied to matrices only, not to the gains of the norms."""
    grad_clip: Annotated[float, Field(gt=0.0)] = 1.0
    """Scale gradients with a larger norm down to this norm."""

    @model_validator(mode="after")
    def _storage_fits(self) -> Self:
        if self.weights == "fp32" and (self.master or self.stochastic_rounding):
            raise ValueError("FP32 weights have no master and are not rounded: set weights=bf16 or weights=fp8, too")
        if self.weights == "fp8" and self.master is None:
            raise ValueError("weights=fp8 needs a master: set master=remainder or master=fp32")
        if self.amax_every > 1 and (self.name != "adamw" or self.weights != "fp8"):
            raise ValueError("amax_every is for FP8 weights under adamw: set name=adamw and weights=fp8, too")
        if self.master and self.stochastic_rounding:
            raise ValueError("stochastic_rounding is for weights without a master: set master=null, too")
        return self

    @property
    def plain(self) -> bool:
        """Whether torch's own fused AdamW suffices: FP32 weights and FP32 moments."""
        return self.name == "adamw" and self.weights == self.moments == "fp32"


class ScheduleConfig(Section):
    """Linear warm-up, then half a cosine."""

    warmup_fraction: Fraction = 0.1
    """Share of the steps in which the learning rate rises from 0."""
    final_fraction: Fraction = 0.1
    """Learning rate of the last step, as a share of the highest."""

    def factor(self, step: int, steps: int) -> float:
        """Share of the highest learning rate at step `step` of `steps`, counted from 1.

        Example:
            >>> [round(ScheduleConfig(warmup_fraction=0.5).factor(step, 4), 3) for step in (1, 2, 3, 4)]
            [0.5, 1.0, 0.55, 0.1]
        """
        warmup = math.ceil(self.warmup_fraction * steps)
        if step <= warmup:
            return step / warmup
        cosine = 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
        return self.final_fraction + (1.0 - self.final_fraction) * cosine


class CheckpointConfig(Section):
    """When to write a checkpoint, and how many to keep."""

    every: Annotated[int, Field(ge=0)] = 100
    """Steps from one checkpoint to the next. 0: one checkpoint, at the end."""
    keep: Positive = 2
    """How many of the newest checkpoints to keep."""
    asynchronous: bool = False
    """With several processes: training continues while a checkpoint is written. This needs memory for a copy of it."""


class EvaluationConfig(Section):
    """Loss on the held-out text."""

    every: Annotated[int, Field(ge=0)] = 50
    """Steps from one evaluation to the next. The last step is always evaluated; 0: no other step."""
    batches: Positive = 16
    """Batches of batch_size sequences, the same ones each time and for every seed."""


class GuardConfig(Section):
    """Settings of `ottava.debug.SpikeGuard`, which undoes loss spikes."""

    every: Positive = 50
    """Steps from one snapshot in memory to the next."""
    snapshots: Positive = 3
    """How many snapshots to keep."""
    z: Annotated[float, Field(gt=0.0)] = 6.0
    """A loss this many robust standard deviations above the median of the last losses is a spike."""
    hold: Positive = 100
    """Steps in high precision after a spike that FP8 caused."""


class ParallelConfig(Section):
    """Processes that share the run, as torchrun starts them: dp x cp x shard x tp x pp. They share one batch."""

    dp: Positive = 1
    """Replicas, each with its own part of the batch: DistributedDataParallel, or FSDP2's replicas if `shard` is above
    1."""
    shard: Positive = 1
    """Processes that share weights, gradients and moments, and read a part of the batch each: FSDP2. Weights are
    gathered as FP8 codes where the recipe allows it."""
    tp: Positive = 1
    """Processes that share each layer: tensor parallelism, with tokens split between the layers."""
    pp: Positive = 1
    """Stages of a pipeline: each holds some of the layers."""
    cp: Positive = 1
    """Processes that share each sequence: each holds a part of the tokens, and gathers keys and values."""
    ep: Positive = 1
    """Number of replicas (dp x cp) that share the experts of each layer. Tokens travel to their experts, as FP8 codes
    where the recipe allows it."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """The order of microbatches in a pipeline. interleaved gives each process two stages."""
    timeout: Annotated[float, Field(gt=0.0)] = 300.0
    """Seconds that a process waits for the others before the run ends with an error."""
    verify_every: Annotated[int, Field(ge=0)] = 100
    """Steps from one comparison of all processes (`ottava.distributed.verify`) to the next; 0: none."""

    @property
    def processes(self) -> int:
        """Number of processes."""
        return self.replicas * self.shard * self.tp * self.pp

    @property
    def replicas(self) -> int:
        """Number of processes that hold the same part of the weights and average its gradients."""
        return self.dp * self.cp

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return self.pp * (2 if self.schedule == "interleaved" and self.pp > 1 else 1)


_LATER = MappingProxyType(
    {
        "": ("carry", "rewarm", "accumulator"),
        "model": ("experts", "experts_per_token", "aux_loss"),
        "optimizer": ("name", "weights", "master", "moments", "stochastic_rounding", "momentum"),
    }
)
"""Settings that count only if they differ from their default, by section; a new setting belongs here."""
_DEFAULTS = MappingProxyType({"model": ModelConfig(), "optimizer": OptimizerConfig()})


DEMO_SETTINGS = (
    "batch_size=16",
    "sequence_length=64",  # in so few steps, more and shorter sequences learn faster
    "schedule.warmup_fraction=0.2",  # after a slow start the seeds end closer together, and smaller differences show
    "evaluation.batches=8",
    "checkpoint.every=50",
    "checkpoint.keep=1",
)
"""Values of the demo and of the lab: runs so short that a laptop does several."""
_MOST_PARTS = 1 << 16
"""Microbatches that an older version may have counted: a batch_size of 2**53 has divisors that nobody tried."""
FREE = ("checkpoint", "evaluation", "microbatches", "parallel", "watch")
"""Settings that a resumed run may change."""


class TrainConfig(Section):
    """One training run, completely: the same config on the same machine gives the same curve, bit for bit."""

    recipe: str | dict[str, Any] = "tensorwise"
    """Name of an FP8 recipe, or a whole one spelled out as `Recipe.to_dict()` writes it."""
    accumulator: Annotated[str, AfterValidator(lambda name: get_accumulator(name).name)] | None = None
    """An accumulation profile, such as hopper: GEMMs on codes emulate its sums on any device (docs/accumulation.md).
    recipe=NAME/hopper sets the same. null: the device's own sums."""
    steps: Positive = 400
    """Optimizer steps."""
    batch_size: Positive = 16
    """Sequences of one step, in all processes together."""
    microbatches: Positive = 1
    """Microbatches of each process. A step uses the mean of their gradients; a pipeline works on several at once."""
    sequence_length: Positive = 128
    """Bytes of a sequence; the model predicts the next byte at each of them."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Decides the initial weights and the order of the data."""
    init: Absolute = None
    """A run folder, a checkpoint, or a folder of weights: of `ottava export` or `consolidate`, or a Llama of Hugging
    Face's with 256 tokens. The run starts from its weights, and calibrates predicted scales on them. null: the run
    draws its weights at random."""
    carry: Literal["weights", "optimizer"] = "weights"
    """What the run takes from `init`. "weights": the weights alone; the run begins with step 1. "optimizer": also the
    optimizer's states and the step count; the run continues with the next step."""
    rewarm: Annotated[int, Field(ge=0)] = 0
    """Steps after the start from `init` in which the learning rate rises to its schedule again; 0: none."""
    device: Annotated[str, AfterValidator(_a_device)] = "auto"
    """auto (a CUDA GPU if there is one), cpu, cuda or cuda:N."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """The dtype of operators without FP8. `optimizer.weights` sets that of the parameters."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    watch: WatchConfig | None = None
    """Settings of `ottava.watch`, {} for its defaults. The watch writes statistics of every cast into the run folder,
    for `ottava report`, `diagnose` and `compare`. null: no watch."""

    parallel: ParallelConfig = ParallelConfig()
    guard: GuardConfig | None = None
    """Settings of the guard against loss spikes, {} for its defaults. At a spike the guard rewinds the run, replays the
    steps in high precision, and then skips the batch or leaves FP8 for a while. null: no guard."""
    auto_fallback: Literal["off", "propose", "apply"] = "off"
    """Other recipes for layers with bad casts, at each look of the watch. "propose" writes proposals as events of the
    watch; "apply" also changes the layers' recipes. Needs `watch`."""

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        if self.auto_fallback != "off" and self.watch is None:
            raise ValueError(f"auto_fallback is {self.auto_fallback!r}, which needs a watch: set watch={{}}, too")
        if self.init is None and (self.carry != "weights" or self.rewarm):
            raise ValueError("carry and rewarm are about the run that init names: set init=RUN, too")
        ranks, model = self.parallel, self.model
        parts = ranks.dp * ranks.shard * self.microbatches
        multiples = {
            "batch_size": (self.batch_size, parts, "parallel.dp x parallel.shard x microbatches"),
            "model.kv_heads": (model.kv_heads, ranks.tp, "parallel.tp"),
            "model.ffn": (model.ffn, ranks.tp, "parallel.tp"),
            "parallel.dp x parallel.cp": (ranks.replicas, ranks.ep, "parallel.ep"),
            "model.experts": (model.experts, ranks.ep, "parallel.ep"),
            "sequence_length": (self.sequence_length, ranks.cp * ranks.tp, "parallel.cp x parallel.tp"),
            "microbatches": (self.microbatches, ranks.pp, "parallel.pp"),
        }
        for name, (size, parts, why) in multiples.items():
            if size % parts:
                raise ValueError(f"{name} is {size}; needs a multiple of {why}, which is {parts}")
        if model.layers < ranks.stages:
            raise ValueError(f"model.layers is {model.layers}; needs one for each of {ranks.stages} pipeline stages")
        if ranks.processes > 1 and (self.guard is not None or self.auto_fallback != "off"):
            raise ValueError("guard and auto_fallback watch one process: leave them off, or set parallel to 1 process")
        if ranks.processes > 1 and self.carry == "optimizer":
            raise ValueError("carry=optimizer needs one process; --resume can continue its checkpoint with several")
        if ranks.processes > ranks.replicas and self.optimizer.name == "muon":
            raise ValueError("optimizer.name=muon needs whole weights: set parallel.shard, tp and pp to 1")
        if ranks.ep > 1 and (not model.experts or ranks.shard * ranks.tp > 1 or self.optimizer.weights == "fp8"):
            raise ValueError("parallel.ep needs model.experts, shard=1, tp=1, and weights that are not fp8")
        if ranks.tp > 1 and model.experts:
            raise ValueError("parallel.tp does not split experts: set parallel.ep instead")
        if model.experts and self.optimizer.name == "muon":
            raise ValueError("optimizer.name=muon updates matrices, but experts are stacks of matrices: set adamw")
        if ranks.tp > 1 and self.optimizer.weights == "fp8":
            raise ValueError("optimizer.weights=fp8 cannot be split by parallel.tp: set parallel.shard instead")
        return self

    @field_validator("recipe", mode="before")
    @classmethod
    def _known_recipe(cls, recipe: object) -> object:
        if not isinstance(recipe, str | dict):
            raise ValueError(f"got {recipe!r}; needed: a recipe's name, or a mapping as Recipe.to_dict() writes it")
        _as_recipe(recipe)
        return recipe

    def build_recipe(self) -> Recipe:
        """The recipe of the setting `recipe`, a name or a mapping, under `accumulator`."""
        recipe = _as_recipe(self.recipe)
        return recipe if self.accumulator is None else recipe.under(self.accumulator)

    def to_yaml(self) -> str:
        """The whole tree as YAML; `load_config` reads an equal tree back."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def digest(self) -> str:
        """Hash of the settings that decide the run.

        These are all but `checkpoint`, `evaluation`, `microbatches`, `parallel` and `watch`. A setting of `_LATER`
        counts only if it differs from its default, so a run from before the setting can resume.
        """
        return _hash_of(self._decisive())

    def older_digests(self) -> frozenset[str]:
        """Hashes that older versions gave these settings, for checkpoints that they wrote.

        They counted `microbatches`, which may change now, and some were written before `amax_every`.
        """
        forms = [self._decisive()]
        if self.optimizer.amax_every == OptimizerConfig().amax_every:
            optimizer = {name: v for name, v in forms[0]["optimizer"].items() if name != "amax_every"}
            forms.append(forms[0] | {"optimizer": optimizer})
        parts = [n for n in range(2, min(self.batch_size, _MOST_PARTS) + 1) if self.batch_size % n == 0]
        counted = [{}, *({"microbatches": n} for n in parts)]
        return frozenset(_hash_of(form | count) for form in forms for count in counted)

    def _decisive(self) -> dict[str, Any]:
        decisive = self.model_dump(mode="json", exclude={*FREE})
        for section, names in _LATER.items():
            values, default = (decisive[section], _DEFAULTS[section]) if section else (decisive, TrainConfig())
            for name in names:
                if values[name] == getattr(default, name):
                    del values[name]
        return decisive


def _hash_of(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _as_recipe(recipe: str | Mapping[str, Any]) -> Recipe:
    try:
        return get_recipe(recipe) if isinstance(recipe, str) else Recipe.from_dict(dict(recipe))
    except TypeError as error:  # an unknown field; pydantic collects only ValueError
        raise ValueError(str(error)) from error


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """Reads a YAML file (None: all defaults), applies overrides such as "optimizer.learning_rate=1e-3", checks all.

    Args:
        path: the file. It holds a mapping; a missing key keeps its default.
        overrides: each `a.b=c` with c in YAML ("null", "[0.9, 0.99]" and "{...}" work); later ones win.

    Raises:
        ConfigError: the file is missing or no YAML mapping, a key is unknown, or a value is not allowed. The message
            lists all problems of the config; for an unknown key it gives the full path and the nearest known key.

    Example:
        >>> load_config(None, ["model.layers=2", "recipe=rowwise"]).model.layers
        2
    """
    tree = {} if path is None else read_yaml(path)
    for override in overrides:
        apply_override(tree, override)
    return TrainConfig.checked(tree, path)
