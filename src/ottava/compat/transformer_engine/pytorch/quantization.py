"""TransformerEngine's contexts `autocast` and `fp8_autocast`, and its functions that report the FP8 state.

ottava updates delayed scales at optimizer steps; TransformerEngine updates them when an autocast or a backward ends. In
a loop of one forward, one backward and one step both have the same scales. With several micro-batches a step, the
histories of TransformerEngine count micro-batches, and its recomputation needs the stashed scales of the forward.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.module import register_module_parameter_registration_hook

from ottava.base.errors import need
from ottava.compat.transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    MXFP8BlockScaling,
    QuantizerRole,
    Recipe,
    asked_as,
)
from ottava.compat.transformer_engine.pytorch import quantizers
from ottava.compat.transformer_engine.pytorch.tensors import QuantizedTensor
from ottava.engine.autocast import AMBIENT, Autocast
from ottava.engine.autocast import autocast as our_autocast
from ottava.engine.quantizer import WeightQuantizer
from ottava.interop.contents import StateFileError, read_extra_state
from ottava.nn.convert import model_init
from ottava.nn.layer import Layer
from ottava.weights.parameter import QuantizedWeight


def debug_tool() -> Any:
    """The `execution.Tool` of a script that has imported nvdlfw_inspect; None: it has not, or its own."""
    return vars(sys.modules.get("nvdlfw_inspect.api", os)).get("tool")


def get_default_recipe() -> Recipe:
    """MXFP8BlockScaling on Blackwell, DelayedScaling elsewhere."""
    blackwell = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)
    return MXFP8BlockScaling() if blackwell else DelayedScaling()


def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: ProcessGroup | None = None,
) -> Autocast:
    """Runs the modules of this package in FP8 under a recipe; a context or a decorator.

    Args:
        enabled: False runs them in high precision.
        calibrating: with enabled=False, record the amax of every tensor that FP8 would cast: inputs, weights and, for a
            backward inside the context, gradients. TransformerEngine's Linear records nothing.
        recipe: a recipe of `common.recipe`; None: `get_default_recipe()`.
        amax_reduction_group: ranks that share amaxes; None: the model's own group. No rank with reduce_amax=False.
    Raises:
        TypeError: the recipe is no recipe of `common.recipe`.

    Example:
        >>> import torch
        >>> layer = torch.nn.Sequential()
        >>> with autocast(enabled=False):
        ...     y = layer(torch.ones(2))
    """
    chosen = get_default_recipe() if recipe is None else recipe
    need("autocast", chosen, Recipe, "a recipe of ottava.compat.transformer_engine.common.recipe")
    calibrates, tool = calibrating and not enabled, debug_tool()
    cells = chosen.ottava if tool is None else tool.recipe(chosen.ottava)
    asked_as(cells)[:] = asked_as(chosen.ottava)
    if not getattr(chosen, "reduce_amax", True) and dist.is_initialized():
        # of this rank alone, without a backend, because it sends nothing; torch's stubs lack this constructor
        amax_reduction_group = ProcessGroup(0, 1)  # type: ignore[call-arg]
    return our_autocast(
        cells if enabled or calibrates else "bf16",
        enabled=enabled,
        calibrating=calibrates,
        group=amax_reduction_group,
    )


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: ProcessGroup | None = None,
) -> Autocast:
    """`autocast` with its old name and old argument names."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """`ottava.model_init`: layers that are built inside store their weights as FP8 codes only.

    Args:
        enabled: False changes nothing.
        recipe: a recipe of `common.recipe`; None: `get_default_recipe()`. The layers keep it, so they run in FP8
            outside an autocast, too; not those of NVFP4 and a HybridQuantizer, which store both directions.
        preserve_high_precision_init_val: keep the initial numbers as `weight.high_precision`, for the masters of an
            optimizer.
    Raises:
        TypeError: the recipe is no recipe of `common.recipe`.  ValueError: the recipe casts no weights to FP8.
    """
    if not enabled:
        yield
        return
    chosen = get_default_recipe() if recipe is None else recipe
    need("quantized_model_init", chosen, Recipe, "a recipe of ottava.compat.transformer_engine.common.recipe")
    cells = replace(chosen.ottava, overrides=()) if isinstance(chosen, CustomRecipe) else chosen.ottava  # no names yet
    keep = preserve_high_precision_init_val
    made = chosen.qfactory(QuantizerRole("linear", "weight")) if isinstance(chosen, CustomRecipe) else None
    own = chosen.nvfp4() or isinstance(made, quantizers.HybridQuantizer)
    with _stored_by(chosen, keep) if own else model_init(cells, keep_high_precision=keep):
        yield


def quantizer_of_weight(recipe: Recipe, layer: Any) -> Any:
    """The quantizer that casts as a layer casts its weight under a recipe."""
    state = quantizers.RecipeState.create(recipe, mode="forward", roles=[QuantizerRole("linear", "weight", layer.name)])
    made, weight = state.make_quantizers()[0], layer.weight
    if isinstance(made, quantizers.Float8Quantizer):  # of delayed scaling: the scale of the layer's history
        made.scale, made.amax = layer.quantizers.weight.scale, torch.zeros(1, device=weight.device)
    squares = getattr(made, "with_2d_quantization", False) and not (made.row_scaled_nvfp4 or made.nvfp4_use_4over6)
    tiles = isinstance(made, quantizers.MXFP8Quantizer) or (squares and not any(size % 128 for size in weight.shape))
    made.optimize_for_gemm = tiles and not isinstance(weight, QuantizedWeight | QuantizedTensor)
    return made


@contextmanager
def _stored_by(recipe: Recipe, keep_high_precision: bool) -> Iterator[None]:
    """Casts the weights of linear layers that are made inside by the quantizers of a recipe, at the end."""
    made: list[Layer] = []

    def note(module: nn.Module, name: str, parameter: Any) -> None:
        if isinstance(module, Layer) and name == "weight":
            made.append(module)

    with register_module_parameter_registration_hook(note):
        yield
    for layer in made:
        old = layer.weight
        own = quantizer_of_weight(recipe, layer)
        own.optimize_for_gemm = False  # optimizers and collectives write into it
        new = nn.Parameter(own.quantize(old.detach()), old.requires_grad)
        vars(new).update(vars(old))
        if keep_high_precision:
            vars(new)["high_precision"] = old.detach().cpu()
        layer.weight = new
        layer.quantizers.weight.__class__ = _StoredDoor


class _StoredDoor(WeightQuantizer):
    """The door of a weight that may be stored as a quantized tensor: it gives the codes, without a cast."""

    def forward(self, x: Any, *specs: Any, rowwise: bool = True, columnwise: bool = True, **others: Any) -> Any:
        """As `WeightQuantizer.forward`.

        Raises:
            ValueError: the recipe of the autocast casts weights otherwise.
        """
        if not isinstance(x, QuantizedTensor):
            return super().forward(x, *specs, rowwise=rowwise, columnwise=columnwise, **others)
        return tuple(
            _operand(x, spec, turned) if asked else None
            for turned, (spec, asked) in enumerate(zip(specs, (rowwise, columnwise), strict=True))
        )


def _operand(x: QuantizedTensor, spec: Any, turned: int) -> Any:
    codes = x.columns if turned else x.rows
    if spec is None:
        return codes if isinstance(codes, Tensor) else x.numbers().t() if turned else x.numbers()
    if getattr(codes, "spec", None) != spec:
        raise ValueError(
            f"a weight {tuple(x.shape)} is stored as {getattr(codes, 'spec', None)} in the direction of "
            f"{'W.T' if turned else 'W'}, and the autocast casts it to {spec}, a second rounding; give "
            "quantized_model_init and autocast one recipe"
        )
    return codes


fp8_model_init = quantized_model_init


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """True: ottava runs FP8 on every device, emulated on those without FP8 tensor cores. A receipt names what ran."""
    return (True, "") if return_reason else True


is_mxfp8_available = is_fp8_block_scaling_available = is_nvfp4_available = is_bf16_available = is_fp8_available


def get_device_compute_capability() -> tuple[int, int]:
    """(major, minor) of the GPU; (0, 0) on a machine without a GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


get_default_fp8_recipe = get_default_recipe


def get_cudnn_version() -> tuple[int, int, int]:
    """(major, minor, patch) of torch's cuDNN; (0, 0, 0) if torch has no cuDNN."""
    number = torch.backends.cudnn.version() or 0
    return number // 10_000, number % 10_000 // 100, number % 100


class _Stateless(type):
    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(
            f"{cls.__name__}.{name} is not in ottava: histories and scales are buffers of layer.quantizers, and move "
            "at optimizer steps"
        )


class FP8GlobalStateManager(metaclass=_Stateless):
    """TransformerEngine's global state, for scripts that read it. In ottava each module holds its own state."""

    @staticmethod
    def reset() -> None:
        """Does nothing but warn. In TransformerEngine this call freezes the scales of all modules."""
        warnings.warn(
            "FP8GlobalStateManager.reset() does nothing in ottava: no state is global, so models cannot disturb each "
            "other. Remove the call",
            stacklevel=2,
        )

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Whether an autocast with a quantized recipe is active."""
        ambient = AMBIENT.get()
        return ambient.enabled and ambient.recipe is not None and ambient.recipe.quantized

    @staticmethod
    def get_fp8_recipe() -> Recipe:
        """The recipe of the autocast that is active; without one the default."""
        return next(iter(asked_as(AMBIENT.get().recipe)), None) or get_default_recipe()

    @staticmethod
    def is_fp8_calibration() -> bool:
        """Whether an autocast with calibrating=True is active."""
        return AMBIENT.get().calibrating

    is_fp8_available = is_mxfp8_available = is_fp8_block_scaling_available = staticmethod(lambda: (True, ""))
    is_nvfp4_available = is_fp8_available


_STATELESS = ("Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling", "CustomRecipe")
UNSAFE_PICKLE_EXTRA_STATE_ENV = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


def should_load_extra_state_pickle(data: bytes, context: str) -> bool:
    """Whether the pickle of an `_extra_state` holds histories that a caller may load; it is not executed to see.

    ottava's modules need no leave: they read such bytes without executing them.

    Args:
        data: the bytes.  context: what they are of, for the error.
    Raises:
        RuntimeError: the pickle holds histories, or anything but plain values and recipes, and the variable
            NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE, by which TransformerEngine executes it, is not 1.
    """
    if not data:
        return False
    with contextlib.suppress(StateFileError):
        state = read_extra_state(context, "_extra_state", torch.frombuffer(bytearray(data), dtype=torch.uint8))
        recipe = state.get("recipe") if isinstance(state, dict) else None
        known = getattr(recipe, "qualified_name", "").rpartition(".")[2] in _STATELESS
        plain = state is None or (isinstance(state, dict) and state.keys() <= {"recipe", "extra_fp8_variables"})
        if plain and (recipe is None or known):
            return False
    if os.environ.get(UNSAFE_PICKLE_EXTRA_STATE_ENV) == "1":
        return True
    raise RuntimeError(
        f"{context}: got a pickled _extra_state with histories or unknown objects, and {UNSAFE_PICKLE_EXTRA_STATE_ENV} "
        "is not 1. Give it to a module's load_state_dict: ottava reads it without executing it"
    )


def is_non_tn_fp8_gemm_supported() -> bool:
    """True: where one scale serves both directions, `general_gemm` takes codes of rows in every layout."""
    return True


def round_up_to_nearest_multiple(value: int, multiple: int) -> int:
    """The least multiple that is not smaller.

    Example:
        >>> round_up_to_nearest_multiple(33, 16)
        48
    """
    return -(-value // multiple) * multiple


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """The multiple to which scripts pad rows of experts: 32 for MXFP8, 128 for NVFP4, else 16.

    ottava needs none: it pads operands itself.
    """
    if isinstance(recipe, CustomRecipe):
        return recipe.quantization_alignment
    return 32 if recipe.mxfp8() else 128 if recipe.nvfp4() else 16


def _default_sf_compute(amax: Tensor, scale: Tensor, fp8_max: float, margin: int) -> Tensor:
    """TransformerEngine's next scale, written into scale: fp8_max / amax / 2**margin, or as before without an amax."""
    found = (fp8_max / amax / 2**margin).clamp(max=torch.finfo(torch.float32).max)
    return scale.copy_(torch.where((amax > 0) & amax.isfinite(), found, scale))
