"""TransformerEngine's recipe classes with the same fields and defaults; each becomes a table of ottava's six cells.

The constructor refuses every unknown field: TransformerEngine accepts `DelayedScaling(amax_history_length=16)` and
keeps 1024. A recipe that ottava cannot honour can be made, compared and listed; an autocast refuses it.

Source: TransformerEngine 2.20, transformer_engine/common/recipe/__init__.py.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field, fields, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ottava.base.errors import RefusesUnknownFields, need_known, need_type, unknown_name
from ottava.numerics import formats
from ottava.numerics.scaling import BLOCK_1X16, BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, TE_FOUR_OVER_SIX, Granularity
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import (
    ATTENTION_TENSORS,
    CELL_OF,
    GEMMS,
    HIGH_PRECISION,
    TENSOR_OF,
    TENSORS,
    AttentionRecipe,
    GemmRecipe,
    Override,
    get_recipe,
)
from ottava.recipe import Recipe as OttavaRecipe


class Maxima(NamedTuple):
    """The largest numbers of a `Format`."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Number formats of forward and backward; HYBRID: E4M3 forward, E5M2 for gradients."""

    E4M3 = Maxima(formats.E4M3.max, formats.E4M3.max)
    E5M2 = Maxima(formats.E5M2.max, formats.E5M2.max)
    HYBRID = Maxima(formats.E4M3.max, formats.E5M2.max)
    E2M1 = Maxima(formats.E2M1.max, formats.E2M1.max)


@dataclass(frozen=True, kw_only=True)
class MMParams(RefusesUnknownFields):
    """How one GEMM accumulates its sums."""

    use_split_accumulator: bool = True
    """False: Hopper keeps partial sums in its short accumulator. ottava calls this fast_accum."""


@dataclass(frozen=True, kw_only=True)
class QParams(RefusesUnknownFields):
    """How one tensor is quantized. A recipe's `fp8_quant_*` and `fp4_quant_*` hold one each, and can be assigned."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


_MX = QuantizationSpec(formats.E4M3, BLOCK_1X32, "e8m0")


@functools.lru_cache(maxsize=256)
def asked_as(recipe: OttavaRecipe | None) -> list[Recipe]:
    """The recipe of TransformerEngine as which such cells were asked last; empty: none. Autocasts keep one object for
    all recipes with equal cells, so it cannot tell."""
    return []


@dataclass(kw_only=True)
class Recipe(RefusesUnknownFields):
    """The base class of all recipes. `ottava` is the recipe that runs.

    A field can be assigned: the new value is checked as the constructor checks it. Cells that no GEMM multiplies
    together are refused by `ottava`, since two assignments may lead from one recipe to another.
    """

    REFUSED: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Field -> advice, for fields that accept only their default."""
    ATTENTION: ClassVar[AttentionRecipe | None] = None
    """The casts of attention with fp8_dpa=True; None: the recipe refuses fp8_dpa."""

    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        self.check()
        with contextlib.suppress(NotImplementedError):  # a script may list recipes that it does not run
            self.ottava  # noqa: B018  # refuses cells that no GEMM supports already in the constructor
        self.__dict__["_made"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "_made" not in self.__dict__:
            super().__setattr__(name, value)
            return
        known = [one.name for one in fields(self)]
        if name not in known:
            raise AttributeError(f"{type(self).__name__}: {unknown_name('field', name, known)}")
        before = getattr(self, name)
        super().__setattr__(name, value)
        try:
            self.check()
        except Exception:
            super().__setattr__(name, before)
            raise
        self.__dict__.pop("_ottava", None)

    def check(self) -> None:
        """Refuses values without a meaning, and fills in what follows from others.

        Raises:
            ValueError, TypeError: it names the field and what is needed.
        """
        kinds = {"bool": bool, "int": int, "Format": Format, "QParams | None": QParams, "MMParams": MMParams}
        for one in fields(self):
            kind, value = kinds.get(str(one.type)), getattr(self, one.name)
            if kind is not None and not (kind is QParams and value is None):
                need_type(f"{type(self).__name__}: {one.name}", value, kind)
        if (given := self.backward_override) not in (None, *(known := ("high_precision", "dequantized"))):
            raise ValueError(f"{type(self).__name__}: {unknown_name('backward_override', given, ('None', *known))}")

    def _made_of_cells(self) -> OttavaRecipe:
        others = "attention casts per tensor or in blocks of 32, under DelayedScaling, Float8CurrentScaling or MXFP8"
        attention = {} if self.ATTENTION is not None else {"fp8_dpa": others, "fp8_mha": others}
        if self.ATTENTION is not None and self.ATTENTION.blocks:
            attention["fp8_mha"] = "results of attention stay in high precision there, as in TransformerEngine"
        for name, advice in {**attention, **self.REFUSED}.items():
            default = type(self).__dataclass_fields__[name].default
            if getattr(self, name) != default:
                raise NotImplementedError(
                    f"{type(self).__name__}: {name}={getattr(self, name)!r} is not in ottava; needs {default!r}: "
                    + advice
                )
        recipe = self._cells()
        if (self.fp8_dpa or self.fp8_mha) and self.ATTENTION is not None:
            recipe = replace(recipe, attention=self._attention_formats(self.ATTENTION))
        if self.backward_override is not None:
            recipe = replace(recipe, dgrad=HIGH_PRECISION, wgrad=HIGH_PRECISION)
        decoded = ("input", "weight") if self.backward_override == "dequantized" else ()
        if decoded or getattr(self, "row_scaled_activation", False):
            kind = FactoryRecipe if isinstance(recipe, FactoryRecipe) else DecodedRecipe
            made: dict[str, Any] = {one.name: getattr(recipe, one.name) for one in fields(recipe) if one.init}
            alone = (("input", "row"), ("input", "col")) if getattr(self, "row_scaled_activation", False) else ()
            made |= {"decoded": decoded, "rows_alone": alone}
            recipe = kind(**made)
        registered = isinstance(recipe, FactoryRecipe) or recipe == get_recipe(recipe.name)
        return recipe if registered else replace(recipe, name=type(self).__name__)

    @property
    def ottava(self) -> OttavaRecipe:
        """The ottava recipe with the same arithmetic: one object until a field is assigned.

        Raises:
            NotImplementedError: a field has a value that ottava cannot honour; the message says what to do.
        """
        if "_ottava" not in self.__dict__:
            made = self.__dict__["_ottava"] = self._made_of_cells()
            asked_as(made)[:] = [copy.copy(self)]  # for scripts that ask an autocast for its recipe
        return self.__dict__["_ottava"]  # type: ignore[no-any-return]  # as it was put there

    def _cells(self) -> OttavaRecipe:
        raise NotImplementedError(type(self).__name__)

    def _attention_formats(self, attention: AttentionRecipe) -> AttentionRecipe:
        """The casts of attention: gradients in the backward's format; with fp8_mha, what leaves attention, too."""
        if self.fp8_mha and not attention.blocks:
            attention = replace(attention, o=attention.s, dqkv=attention.dp)
        backward = formats.E4M3 if self.fp8_format == Format.E4M3 else formats.E5M2
        changed: dict[str, Any] = {
            name: replace(spec, format=backward)
            for name in ("do", "dp", "dqkv")
            if (spec := getattr(attention, name)) is not None
        }
        return replace(attention, **changed)

    def _formats(self, recipe: OttavaRecipe) -> OttavaRecipe:
        """The recipe with the number formats of `fp8_format` in all cells."""
        if self.fp8_format not in (Format.E4M3, Format.HYBRID):
            raise ValueError(
                f"{type(self).__name__}: fp8_format is {self.fp8_format.name}; needs E4M3 or HYBRID: no tensor core "
                "multiplies E5M2 by E5M2"
            )
        gradients = formats.E4M3 if self.fp8_format == Format.E4M3 else formats.E5M2
        return _each(
            recipe,
            lambda spec, tensor: replace(spec, format=gradients if tensor == "grad_output" else formats.E4M3),
        )

    delayed = classmethod(lambda cls: issubclass(cls, DelayedScaling))
    float8_current_scaling = classmethod(lambda cls: issubclass(cls, Float8CurrentScaling))
    float8_block_scaling = classmethod(lambda cls: issubclass(cls, Float8BlockScaling))
    float8_per_tensor_scaling = classmethod(lambda cls: issubclass(cls, DelayedScaling | Float8CurrentScaling))
    mxfp8 = classmethod(lambda cls: issubclass(cls, MXFP8BlockScaling))
    nvfp4 = classmethod(lambda cls: issubclass(cls, NVFP4BlockScaling))
    custom = classmethod(lambda cls: issubclass(cls, CustomRecipe))


@dataclass(frozen=True)
class TheirAmax:
    """A function of TransformerEngine's (L, n) history, as one of ottava's window: row 0 is the newest amax there, and
    the others follow from the oldest on. With `factor`, its scaling_factor_compute_algo, too."""

    algorithm: str | Callable[[Tensor], Tensor]
    factor: Callable[..., Tensor] | None = None
    recipe: Any = field(default=None, compare=False)
    """What the factor gets as its recipe."""

    def __post_init__(self) -> None:
        named = self.algorithm if callable(self.algorithm) else self.factor
        for name in ("__module__", "__qualname__"):  # by which a record names it
            object.__setattr__(self, name, getattr(named, name, type(named).__name__))

    def __call__(self, window: Tensor) -> Tensor:
        """(L,), newest first -> ()."""
        if not callable(self.algorithm):
            return window.amax() if self.algorithm == "max" else window[0]
        return self.algorithm(torch.cat((window[:1], window[1:].flip(0)))[:, None])[0]

    def scale_of(self, amax: Tensor, before: Tensor, spec: QuantizationSpec) -> Tensor:
        """Amaxes and the scales before (0: none; TransformerEngine starts at 1) of a format -> the next, as many."""
        if self.factor is None:
            return spec.scale_of(amax).scale
        given = amax.reshape(-1).clone(), torch.where(before == 0, 1.0, before).expand_as(amax).reshape(-1).clone()
        return self.factor(*given, spec.format.max, self.recipe).reshape(amax.shape)


@dataclass(kw_only=True)
class DelayedScaling(Recipe):
    """ottava's "delayed": scales come from the amaxes of earlier steps.

    The first step differs: ottava scales a tensor by its own amax, TransformerEngine by 1, which flushes every gradient
    below 7.6e-6.

    Example:
        >>> DelayedScaling(margin=1, amax_history_len=16).ottava.fprop.lhs.margin
        1
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    """fprop, dgrad, wgrad: True leaves that GEMM in high precision."""
    params_dtype: InitVar[Any] = None
    """Unused, as device: Megatron Core gives a recipe what it gives to modules."""
    device: InitVar[Any] = None

    def __post_init__(self, *unused: Any) -> None:
        super().__post_init__()

    def check(self) -> None:
        """As `Recipe.check`."""
        if self.backward_override is not None:
            raise ValueError("DelayedScaling: backward_override is for the other recipes; set it to None")
        super().check()

    ATTENTION: ClassVar[AttentionRecipe | None] = AttentionRecipe()

    def _history(self) -> dict[str, Any]:
        rule: Any = self.amax_compute_algo
        if not callable(rule):
            need_known("DelayedScaling", "amax_compute_algo", rule, ("max", "most_recent"))
        if callable(rule) or self.scaling_factor_compute_algo is not None:
            rule = TheirAmax(rule, self.scaling_factor_compute_algo, copy.copy(self))
        return {"margin": self.margin, "amax_history_len": self.amax_history_len, "amax_compute_algo": rule}

    def _attention_formats(self, attention: AttentionRecipe) -> AttentionRecipe:
        """All six casts have a history, with the settings of the linear layers'."""
        specs: dict[str, Any] = {
            name: replace(getattr(attention, name), scaling="delayed", **self._history()) for name in ATTENTION_TENSORS
        }
        return super()._attention_formats(replace(attention, **specs))

    def _cells(self) -> OttavaRecipe:
        recipe = self._formats(get_recipe("delayed", **self._history()))
        overrides = zip(GEMMS, self.override_linear_precision, strict=True)
        changes: dict[str, Any] = {gemm: HIGH_PRECISION for gemm, high in overrides if high}
        return replace(recipe, **changes)


_FP8_PARAMS, _FP4_PARAMS = (
    MappingProxyType({tensor: f"{bits}_quant_{name}" for tensor, name in names.items()})
    for names in ({"input": "fwd_inp", "weight": "fwd_weight", "grad_output": "bwd_grad"},)
    for bits in ("fp8", "fp4")
)
"""Tensor -> the field with its `QParams`."""


@dataclass(kw_only=True)
class Float8CurrentScaling(Recipe):
    """ottava's "tensorwise": one scale a tensor, from its own amax.

    fp8_dpa: attention runs under an `ottava.recipe.AttentionRecipe`, emulated on every device. QKV, dO, S and
    dP are cast; O and dQKV stay in high precision, as in TransformerEngine. ottava scales S and dP by their own amax,
    TransformerEngine by that of the step before.
    """

    fp8_format: Format = Format.HYBRID
    use_power_2_scales: bool = False
    fp8_quant_fwd_inp: QParams | None = None
    """None: with the scales of use_power_2_scales."""
    fp8_quant_fwd_weight: QParams | None = None
    fp8_quant_bwd_grad: QParams | None = None
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()

    ATTENTION: ClassVar[AttentionRecipe | None] = AttentionRecipe(o=None, dqkv=None)

    def check(self) -> None:
        """As `Recipe.check`, and fills in the `QParams` that are None."""
        super().check()
        for name in _FP8_PARAMS.values():
            params = getattr(self, name)
            if params is None:
                self.__dict__[name] = QParams(power_2_scale=self.use_power_2_scales)
            elif params != QParams(power_2_scale=params.power_2_scale):
                raise NotImplementedError(
                    f"Float8CurrentScaling: {name}={params!r} is not in ottava; of its fields only power_2_scale can "
                    "be set: scales of tiny tensors end at FP32's largest number, and Hadamard transforms, stochastic "
                    "rounding and 2-D blocks are fields of ottava.QuantizationSpec"
                )

    def _cells(self) -> OttavaRecipe:
        def scaled(spec: QuantizationSpec, tensor: str) -> QuantizationSpec:
            return replace(spec, scale_format="pow2" if getattr(self, _FP8_PARAMS[tensor]).power_2_scale else "fp32")

        recipe = self._formats(_each(get_recipe("tensorwise"), scaled))
        sums = {gemm: not getattr(self, f"fp8_gemm_{gemm}").use_split_accumulator for gemm in GEMMS}
        gemms: dict[str, Any] = {gemm: replace(getattr(recipe, gemm), fast_accum=fast) for gemm, fast in sums.items()}
        return replace(recipe, **gemms)


@dataclass(kw_only=True)
class Float8BlockScaling(Recipe):
    """ottava's "blockwise": 1x128 for input and gradient, 128x128 for weights; dims choose 1x128 (1) or 128x128 (2)."""

    use_f32_scales: bool = False
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams()
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()

    REFUSED: ClassVar[Mapping[str, str]] = MappingProxyType(
        dict.fromkeys(("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"), "blocks always use the split accumulator")
    )

    def _cells(self) -> OttavaRecipe:
        dims = {
            "input": self.x_block_scaling_dim,
            "weight": self.w_block_scaling_dim,
            "grad_output": self.grad_block_scaling_dim,
        }
        for tensor, dim in dims.items():
            if dim not in (1, 2):
                raise ValueError(f"Float8BlockScaling: got {dim!r} dimensions for blocks of {tensor}; needs 1 or 2")
        recipe = self._formats(get_recipe("blockwise_fp32" if self.use_f32_scales else "blockwise"))
        return _each(
            recipe, lambda spec, tensor: replace(spec, granularity=BLOCK_1X128 if dims[tensor] == 1 else BLOCK_128X128)
        )


@dataclass(kw_only=True)
class MXFP8BlockScaling(Recipe):
    """ottava's "mxfp8": blocks of 32 with a power of two each."""

    margin: int = 0
    """Unused, as in TransformerEngine. ottava accepts only 0."""
    enable_2d_quantization: bool = False
    """Weights in blocks of 32x32."""

    REFUSED = MappingProxyType({"margin": "it does nothing in TransformerEngine either; leave it out"})

    ATTENTION: ClassVar[AttentionRecipe | None] = AttentionRecipe(qkv=_MX, s=None, o=None, do=_MX, dp=None, dqkv=None)

    def _cells(self) -> OttavaRecipe:
        recipe = self._formats(get_recipe("mxfp8"))
        if not self.enable_2d_quantization:
            return recipe
        square = Granularity(32, 32)
        return _each(recipe, lambda spec, tensor: replace(spec, granularity=square) if tensor == "weight" else spec)


SCOPES: Mapping[str, Callable[[str], bool]] = MappingProxyType(
    {
        "none": lambda tensor: False,
        "weights": lambda tensor: tensor == "weight",
        "activations": lambda tensor: tensor != "weight",
        "all": lambda tensor: True,
    }
)
FOUR_OVER_SIX = MappingProxyType({arithmetic: rule for rule, arithmetic in TE_FOUR_OVER_SIX.items()})


@dataclass(kw_only=True)
class NVFP4BlockScaling(Recipe):
    """ottava's "nvfp4_rht"; with disable_rht=True "nvfp4", and with nvfp4_4over6="all", too, "four_over_six_te"."""

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp4_quant_fwd_inp: QParams | None = None
    """None: as the disable_ fields say."""
    fp4_quant_fwd_weight: QParams | None = None
    fp4_quant_bwd_grad: QParams | None = None

    REFUSED = MappingProxyType({"fp4_format": "NVFP4 codes are E2M1"})

    def check(self) -> None:
        """As `Recipe.check`, and fills in the `QParams` that are None."""
        super().check()
        turned = not self.disable_rht
        defaults = {
            "input": QParams(random_hadamard_transform=turned),
            "weight": QParams(fp4_2d_quantization=not self.disable_2d_quantization),
            "grad_output": QParams(
                random_hadamard_transform=turned, stochastic_rounding=not self.disable_stochastic_rounding
            ),
        }
        for tensor, name in _FP4_PARAMS.items():
            params = getattr(self, name)
            if params is None:
                params = self.__dict__[name] = defaults[tensor]
            if params.power_2_scale or params.amax_epsilon:
                raise NotImplementedError(
                    f"NVFP4BlockScaling: {name}={params!r} is not in ottava; NVFP4's scales are E4M3 below one of "
                    "FP32, so leave power_2_scale and amax_epsilon out"
                )
        for setting, known in (
            ("nvfp4_4over6", SCOPES),
            ("nvfp4_4over6_e4m3_use_256", SCOPES),
            ("nvfp4_4over6_err_mode", ("MAE", "MSE")),
        ):
            need_known("NVFP4BlockScaling", setting, getattr(self, setting), known)
        if SCOPES[self.nvfp4_4over6]("input") and not self.disable_rht:
            raise ValueError(
                f"NVFP4BlockScaling: nvfp4_4over6={self.nvfp4_4over6!r} searches the scales of activations, which "
                "TransformerEngine does not do behind the random Hadamard transform: give disable_rht=True or "
                "nvfp4_4over6='weights', or take ottava's recipe four_over_six, which does both"
            )

    def _cells(self) -> OttavaRecipe:
        def cell(spec: QuantizationSpec, tensor: str) -> QuantizationSpec:
            if tensor != "grad_output" and SCOPES[self.nvfp4_4over6](tensor):
                bound = 256.0 if SCOPES[self.nvfp4_4over6_e4m3_use_256](tensor) else 448.0
                spec = replace(spec, block_scale=FOUR_OVER_SIX[bound, self.nvfp4_4over6_err_mode])
            params: QParams = getattr(self, _FP4_PARAMS[tensor])
            return replace(
                spec,
                granularity=Granularity(16, 16) if params.fp4_2d_quantization else BLOCK_1X16,
                rounding="stochastic" if params.stochastic_rounding else "nearest_even",
                transform=spec.transform if params.random_hadamard_transform else None,
            )

        turned = any(getattr(self, name).random_hadamard_transform for name in _FP4_PARAMS.values())
        unturned = "four_over_six_te" if self.nvfp4_4over6 == "all" else "nvfp4"
        return _each(get_recipe("nvfp4_rht" if turned else unturned), cell)


@dataclass(kw_only=True)
class CustomRecipe(Recipe):
    """A recipe of quantizers: `qfactory(role)` gives that of each tensor.

    ottava asks it for the input, the weight and the gradient of a linear layer, and by the layer's name where the
    module got one. A `HybridQuantizer` has one cell for each direction, an `IdentityQuantizer` stays in high precision,
    and a `DelayedScalingRequest` has a history. The quantizers of results and of their gradients are not asked for.

    Example:
        >>> import ottava.compat.transformer_engine.pytorch as te
        >>> recipe = CustomRecipe(qfactory=lambda role: te.MXFP8Quantizer(te.DType.kFloat8E4M3))
        >>> str(recipe.ottava.fprop)
        'E4M3[1x32, e8m0] x E4M3[1x32, e8m0]'
    """

    qfactory: Callable[..., Any]
    fp8_format: Format = Format.HYBRID
    quantization_alignment: int = 128
    """Unused: ottava pads operands itself."""

    def __post_init__(self) -> None:
        self.check()
        self.__dict__["_made"] = True  # the factory is asked by the first autocast

    def check(self) -> None:
        """As `Recipe.check`."""
        if self.quantization_alignment <= 0:
            raise ValueError(
                f"CustomRecipe: quantization_alignment must be positive; got {self.quantization_alignment}, needs 1 or "
                "more (ottava pads operands itself)"
            )
        super().check()

    def _cells(self) -> OttavaRecipe:
        gemms = factory_cells(self.qfactory, "")
        named = Override("*", tuple(gemms.items()))  # a recipe with overrides is asked for each layer
        more: dict[str, Any] = {**gemms, "overrides": (named,), "alignment": self.quantization_alignment}
        return FactoryRecipe("CustomRecipe", qfactory=self.qfactory, **more)


@dataclass(frozen=True)
class QuantizerRole:
    """The tensor for which a factory is asked."""

    module_type: str = ""
    """"linear" or "grouped_linear"; "" where it is not known."""
    tensor_type: str = ""
    """"input", "weight" or "grad_output"."""
    name: str = ""
    """The name that the module's constructor got."""

    def __str__(self) -> str:
        given = (f"{one.name}={getattr(self, one.name)}" for one in fields(self) if getattr(self, one.name))
        return "|".join(given) or "QuantizerRole()"


@dataclass(frozen=True)
class DecodedRecipe(OttavaRecipe):
    """A recipe with casts that no cell says."""

    decoded: tuple[str, ...] = ()
    """Of these tensors, "input", "weight" or "grad_output", the backward's GEMMs read what the forward multiplied,
    decoded; where their cells are quantized, cast again."""
    rows_alone: tuple[tuple[str, str], ...] = ()
    """Of these, as ("input", "col"), each row is cast as a tensor of its own: NVFP4's fp32 scale is that of a row."""


@dataclass(frozen=True)
class FactoryRecipe(DecodedRecipe):
    """The cells of a `CustomRecipe`; a layer that has a name asks the factory by it."""

    qfactory: Callable[..., Any] = field(default=max, repr=False)
    alignment: int = 128
    kept: dict[str, OttavaRecipe] = field(default_factory=dict, repr=False, compare=False)
    """Name of a layer -> its recipe: one object, because plans are kept by the identity of its specs."""

    def for_layer(self, layer: str) -> OttavaRecipe:
        """The recipe of the layer with that name."""
        if layer not in self.kept:
            kind = "grouped_linear" if layer.startswith(GROUPED) else "linear"
            marks: dict[str, list[Any]] = {"decoded": list(self.decoded), "rows_alone": list(self.rows_alone)}
            gemms = factory_cells(self.qfactory, layer.removeprefix(GROUPED), kind, marks)
            made: dict[str, Any] = {**gemms, "attention": self.attention}
            made |= {name: tuple(one) for name, one in marks.items()}
            if not self.dgrad.quantized:
                made |= {"dgrad": HIGH_PRECISION, "wgrad": HIGH_PRECISION}
            self.kept[layer] = DecodedRecipe(self.name, **made)
        return self.kept[layer]


GROUPED = "grouped:"
"""In front of the names of the groups of a GroupedLinear, which are roles of their own."""


def factory_cells(
    qfactory: Callable[..., Any], name: str, kind: str = "linear", marks: Mapping[str, list[Any]] = MappingProxyType({})
) -> dict[str, GemmRecipe]:
    """The GEMMs of the quantizers that a factory gives a linear layer.

    Args:
        marks: its lists get what a `DecodedRecipe` says besides.
    Raises:
        TypeError: the factory gives something else than a quantizer.  ValueError: no GEMM takes two of them together.
    """
    sides: dict[str, dict[str, QuantizationSpec | None]] = {gemm: {} for gemm in GEMMS}
    for tensor in TENSORS:
        quantizer = qfactory(QuantizerRole(kind, tensor, name))
        if not hasattr(quantizer, "specs"):
            raise TypeError(
                f"CustomRecipe: qfactory gave {quantizer!r} for the {tensor}; needs a quantizer such as "
                "MXFP8Quantizer, an IdentityQuantizer to leave it in high precision, or a DelayedScalingRequest"
            )
        cells = quantizer.specs(tensor)
        if marks and getattr(quantizer, "columnwise_source", "original") != "original":
            marks["decoded"].append(tensor)
        for direction, half in (("row", "rowwise_quantizer"), ("col", "columnwise_quantizer")) if marks else ():
            if getattr(getattr(quantizer, half, quantizer), "row_scaled_nvfp4", False):
                marks["rows_alone"].append((tensor, direction))
        for direction, spec in zip(("row", "col"), cells, strict=True):
            gemm, side = CELL_OF[tensor, direction]
            sides[gemm][side] = spec
    return {gemm: GemmRecipe(**cells) for gemm, cells in sides.items()}  # type: ignore[arg-type]  # sides only


def _each(recipe: OttavaRecipe, change: Callable[[QuantizationSpec, str], QuantizationSpec]) -> OttavaRecipe:
    """The recipe with each cell replaced by change(spec, tensor)."""
    gemms: dict[str, Any] = {}
    for gemm in GEMMS:
        cells: GemmRecipe = getattr(recipe, gemm)
        sides: dict[str, Any] = {}
        for side in ("lhs", "rhs"):
            spec = getattr(cells, side)
            sides[side] = None if spec is None else change(spec, TENSOR_OF[gemm, side][0])
        gemms[gemm] = replace(cells, **sides)
    return replace(recipe, **gemms)
