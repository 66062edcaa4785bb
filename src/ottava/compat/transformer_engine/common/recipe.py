"""TransformerEngine's recipe classes with the same fields and defaults; each becomes a table of ottava's six cells.

The constructor refuses a value that ottava cannot honour, and every unknown field. TransformerEngine accepts
`DelayedScaling(amax_history_length=16)` and keeps 1024.

Source: TransformerEngine 2.20, transformer_engine/common/recipe/__init__.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, NoReturn

from ottava.base.errors import RefusesUnknownFields, unknown_name
from ottava.numerics import formats
from ottava.numerics.scaling import BLOCK_1X16, BLOCK_1X128, BLOCK_128X128, TE_FOUR_OVER_SIX, Granularity, ScaleFormat
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import GEMMS, HIGH_PRECISION, TENSOR_OF, AttentionRecipe, GemmRecipe, get_recipe
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
    """How one tensor is quantized. The cells of ottava's recipes state this, so ottava accepts only the defaults."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


@dataclass(frozen=True, kw_only=True)
class Recipe(RefusesUnknownFields):
    """The base class of all recipes. `ottava` is the recipe that runs."""

    REFUSED: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Field -> advice, for fields that accept only their default."""
    ATTENTION: ClassVar[AttentionRecipe | None] = None
    """The casts of attention with fp8_dpa=True; None: the recipe refuses fp8_dpa."""

    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        attention = {"fp8_mha": "codes do not leave attention: leave it out"}
        if self.ATTENTION is None:
            attention["fp8_dpa"] = "attention has no history; Float8CurrentScaling(fp8_dpa=True) emulates it"
        for name, advice in {**attention, **self.REFUSED}.items():
            default = type(self).__dataclass_fields__[name].default
            if getattr(self, name) != default:
                raise NotImplementedError(
                    f"{type(self).__name__}: {name}={getattr(self, name)!r} is not in ottava; needs {default!r}: "
                    + advice
                )
        if self.backward_override not in (None, "high_precision"):
            raise NotImplementedError(
                f"{type(self).__name__}: backward_override={self.backward_override!r} is not in ottava; needs None or "
                "'high_precision'. ottava's recipe.fp8_inputs_bf16_gemm() shows the effect of quantized operands alone"
            )
        self.ottava  # noqa: B018  # refuses cells that no GEMM supports already in the constructor

    @property
    def ottava(self) -> OttavaRecipe:
        """The ottava recipe with the same arithmetic."""
        recipe = self._cells()
        if self.fp8_dpa and self.ATTENTION is not None:
            recipe = replace(recipe, attention=self._attention_formats(self.ATTENTION))
        if self.backward_override == "high_precision":
            recipe = replace(recipe, dgrad=HIGH_PRECISION, wgrad=HIGH_PRECISION)
        registered = recipe == get_recipe(recipe.name)
        return recipe if registered else replace(recipe, name=type(self).__name__)

    def _cells(self) -> OttavaRecipe:
        raise NotImplementedError(type(self).__name__)

    def _attention_formats(self, attention: AttentionRecipe) -> AttentionRecipe:
        """The casts of attention; under fp8_format E4M3, gradients are E4M3, too."""
        if self.fp8_format != Format.E4M3:
            return attention
        do, dp = (replace(spec, format=formats.E4M3) for spec in (attention.do, attention.dp))
        return replace(attention, do=do, dp=dp)

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

    @classmethod
    def delayed(cls) -> bool:
        """Whether this is a DelayedScaling."""
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether this is a Float8CurrentScaling."""
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether this is a Float8BlockScaling."""
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether this is an MXFP8BlockScaling."""
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether this is an NVFP4BlockScaling."""
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def custom(cls) -> bool:
        """False: ottava has no CustomRecipe."""
        return False


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """ottava's "delayed": scales come from the amaxes of earlier steps.

    The first step differs: ottava scales a tensor by its own amax, TransformerEngine by 1, which flushes every gradient
    below 7.6e-6.

    Example:
        >>> DelayedScaling(margin=1, amax_history_len=16).ottava.fprop.lhs.margin
        1
    """

    REFUSED: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "scaling_factor_compute_algo": "scales are max / amax / 2**margin; set the margin",
            "reduce_amax": "amaxes are the maximum over the group; give no group to keep the ranks' amaxes apart",
        }
    )

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

    def _cells(self) -> OttavaRecipe:
        if callable(self.amax_compute_algo):
            raise NotImplementedError(
                "DelayedScaling: amax_compute_algo as a function is not in ottava; use 'max' or 'most_recent'"
            )
        if self.backward_override is not None:
            raise ValueError("DelayedScaling: backward_override is for the other recipes; set it to None")
        history = {name: getattr(self, name) for name in ("margin", "amax_history_len", "amax_compute_algo")}
        recipe = self._formats(get_recipe("delayed", **history))
        overrides = zip(GEMMS, self.override_linear_precision, strict=True)
        changes: dict[str, Any] = {gemm: HIGH_PRECISION for gemm, high in overrides if high}
        return replace(recipe, **changes)


@dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(Recipe):
    """ottava's "tensorwise": one scale a tensor, from its own amax.

    fp8_dpa: attention runs under an `ottava.recipe.AttentionRecipe`, emulated on every device. QKV, dO, S and
    dP are cast; O and dQKV stay in high precision, as in TransformerEngine. ottava scales S and dP by their own amax,
    TransformerEngine by that of the step before.
    """

    fp8_format: Format = Format.HYBRID
    use_power_2_scales: bool = False
    fp8_quant_fwd_inp: QParams | None = None
    fp8_quant_fwd_weight: QParams | None = None
    fp8_quant_bwd_grad: QParams | None = None
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()

    ATTENTION: ClassVar[AttentionRecipe | None] = AttentionRecipe(o=None, dqkv=None)
    REFUSED: ClassVar[Mapping[str, str]] = MappingProxyType(
        dict.fromkeys(
            ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"),
            "use_power_2_scales sets the scales of all three",
        )
    )

    def _cells(self) -> OttavaRecipe:
        scale_format: ScaleFormat = "pow2" if self.use_power_2_scales else "fp32"
        recipe = self._formats(
            _each(get_recipe("tensorwise"), lambda spec, _: replace(spec, scale_format=scale_format))
        )
        return _accumulated(recipe, self.fp8_gemm_fprop, self.fp8_gemm_dgrad, self.fp8_gemm_wgrad)


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(Recipe):
    """ottava's "mxfp8": blocks of 32 with a power of two each."""

    margin: int = 0
    """Unused, as in TransformerEngine. ottava accepts only 0."""
    enable_2d_quantization: bool = False
    """Weights in blocks of 32x32."""

    REFUSED: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"margin": "it does nothing in TransformerEngine either; leave it out"}
    )

    def _cells(self) -> OttavaRecipe:
        recipe = self._formats(get_recipe("mxfp8"))
        if not self.enable_2d_quantization:
            return recipe
        square = Granularity(32, 32)
        return _each(recipe, lambda spec, tensor: replace(spec, granularity=square) if tensor == "weight" else spec)


_SCOPES: Mapping[str, Callable[[str], bool]] = MappingProxyType(
    {
        "none": lambda tensor: False,
        "weights": lambda tensor: tensor == "weight",
        "activations": lambda tensor: tensor != "weight",
        "all": lambda tensor: True,
    }
)
_FOUR_OVER_SIX = MappingProxyType({arithmetic: rule for rule, arithmetic in TE_FOUR_OVER_SIX.items()})


@dataclass(frozen=True, kw_only=True)
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

    REFUSED: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "row_scaled_activation": "each tensor has one fp32 scale above those of its blocks",
            "fp4_format": "NVFP4 codes are E2M1",
        }
    )

    def __post_init__(self) -> None:
        for field, known in (
            ("nvfp4_4over6", _SCOPES),
            ("nvfp4_4over6_e4m3_use_256", _SCOPES),
            ("nvfp4_4over6_err_mode", ("MAE", "MSE")),
        ):
            if getattr(self, field) not in known:
                raise ValueError(f"NVFP4BlockScaling: {unknown_name(field, getattr(self, field), known)}")
        if _SCOPES[self.nvfp4_4over6]("input") and not self.disable_rht:
            raise ValueError(
                f"NVFP4BlockScaling: nvfp4_4over6={self.nvfp4_4over6!r} searches the scales of activations, which "
                "TransformerEngine does not do behind the random Hadamard transform: give disable_rht=True or "
                "nvfp4_4over6='weights', or take ottava's recipe four_over_six, which does both"
            )
        super().__post_init__()

    def _cells(self) -> OttavaRecipe:
        def cell(spec: QuantizationSpec, tensor: str) -> QuantizationSpec:
            if tensor != "grad_output" and _SCOPES[self.nvfp4_4over6](tensor):
                bound = 256.0 if _SCOPES[self.nvfp4_4over6_e4m3_use_256](tensor) else 448.0
                spec = replace(spec, block_scale=_FOUR_OVER_SIX[bound, self.nvfp4_4over6_err_mode])
            if tensor == "weight" and self.disable_2d_quantization:
                return replace(spec, granularity=BLOCK_1X16)
            if tensor == "grad_output" and self.disable_stochastic_rounding:
                return replace(spec, rounding="nearest_even")
            return spec

        unturned = "four_over_six_te" if self.nvfp4_4over6 == "all" else "nvfp4"
        return _each(get_recipe(unturned if self.disable_rht else "nvfp4_rht"), cell)


class CustomRecipe(Recipe):
    """Refused. Write your own recipe as an `ottava.Recipe`, a table of cells."""

    def __new__(cls, *_: Any, **__: Any) -> NoReturn:
        """Always raises NotImplementedError."""
        raise NotImplementedError(
            "CustomRecipe is not in ottava: write an ottava.Recipe, a table of six cells, for ottava.autocast"
        )


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


def _accumulated(recipe: OttavaRecipe, *params: MMParams) -> OttavaRecipe:
    gemms: dict[str, Any] = {
        gemm: replace(getattr(recipe, gemm), fast_accum=not accumulation.use_split_accumulator)
        for gemm, accumulation in zip(GEMMS, params, strict=True)
    }
    return replace(recipe, **gemms)
