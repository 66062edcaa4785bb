"""TransformerEngine's fusible operations (te.ops) as modules of ottava, one after the other in a `Sequential`.

ottava fuses an operation in front of a cast where one module has both (`LayerNormLinear`, `LayerNormMLP`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ottava.compat.transformer_engine.common.recipe import QuantizerRole
from ottava.compat.transformer_engine.pytorch import module
from ottava.compat.transformer_engine.pytorch.module import L2Normalization as L2Normalization
from ottava.compat.transformer_engine.pytorch.module import activation_for, device_for
from ottava.compat.transformer_engine.pytorch.quantization import FP8GlobalStateManager
from ottava.compat.transformer_engine.pytorch.quantizers import RecipeState
from ottava.compat.transformer_engine.pytorch.refused import absent
from ottava.compat.transformer_engine.pytorch.tensors import QuantizedTensor
from ottava.engine.functional import produced
from ottava.kernels.gate import mapped
from ottava.nn.activations import ActivationFormula
from ottava.nn.layer import autocast_input


class FusibleOperation(nn.Module):
    """The base class of operations."""

    num_extra_inputs = num_extra_outputs = 0
    """Tensors that the forward takes besides x, and returns besides y."""


class Sequential(nn.Sequential):
    """torch.nn.Sequential with extra inputs and outputs, in the order of the operations that take and return them.

    Raises:
        ValueError: extra inputs are missing, or left over.

    Example:
        >>> import ottava.compat.transformer_engine.pytorch as te
        >>> block = te.ops.Sequential(te.ops.MakeExtraOutput(), te.ops.ReLU(), te.ops.AddExtraInput())
        >>> block(torch.tensor([-1.0, 2.0]), torch.tensor([0.5, 0.5]))
        (tensor([0.5000, 2.5000]), tensor([-1.,  2.]))
    """

    def __add__(self, other: Any) -> Sequential:
        return Sequential(*self, *other)

    def __getattr__(self, name: str) -> Any:
        if name == "_module_groups":
            raise AttributeError("Sequential._module_groups is not in ottava: operations run one by one")
        return super().__getattr__(name)

    def forward(self, input: Tensor, *extra_inputs: Tensor) -> Any:
        """x and extra inputs -> y, or (y, extra outputs...)."""
        x, place, outputs = input, 0, []
        wanted = sum(getattr(one, "num_extra_inputs", 0) for one in self)
        if wanted != len(extra_inputs):
            raise ValueError(f"Sequential: got {len(extra_inputs)} extra inputs; its operations need {wanted}")
        for operation in self:
            count = getattr(operation, "num_extra_inputs", 0)
            x = operation(x, *extra_inputs[place : place + count])
            place += count
            if getattr(operation, "num_extra_outputs", 0):
                x, *more = x
                outputs += more
        return (x, *outputs) if outputs else x


_MODULE = MappingProxyType(
    {
        "dtype": "params_dtype",
        "num_groups": "num_gemms",
        "tensor_parallel_mode": "parallel_mode",
        "tensor_parallel_group": "tp_group",
        "rng_state_tracker_function": "get_rng_state_tracker",
        "accumulate_into_main_grad": "fuse_wgrad_accumulation",
    }
)
"""Argument of an operation -> that of a module."""


class _OfModule(FusibleOperation):
    """A module with the arguments of an operation."""

    def __init__(self, *sizes: int, **others: Any) -> None:
        super().__init__(*sizes, **{_MODULE.get(name, name): one for name, one in others.items()})


class Linear(_OfModule, module.Linear):
    """`te.Linear` with the arguments of an operation: dtype, tensor_parallel_mode, accumulate_into_main_grad...

    Example:
        >>> Linear(16, 8, dtype=torch.bfloat16).weight.dtype
        torch.bfloat16
    """


class BasicLinear(Linear):
    """`Linear` without a bias."""

    def __init__(self, *sizes: int, **others: Any) -> None:
        super().__init__(*sizes, bias=False, **others)


class GroupedLinear(_OfModule, module.GroupedLinear):
    """`te.GroupedLinear` with the arguments of an operation.

    Example:
        >>> GroupedLinear(2, 16, 8, bias=False)(torch.ones(3, 16), torch.tensor([1, 2])).shape
        torch.Size([3, 8])
    """

    num_extra_inputs = 1
    num_groups = property(lambda self: self.num_gemms)


class _Norm(FusibleOperation):
    """A norm over the last dimensions, which may be several."""

    def __init__(self, normalized_shape: Any, **others: Any) -> None:
        shape = normalized_shape if isinstance(normalized_shape, Sequence) else (normalized_shape,)
        self.width = torch.Size(shape).numel()
        super().__init__(self.width, **others)

    def forward(self, input: Tensor) -> Tensor:
        """(..., *normalized_shape) -> the same."""
        return super().forward(input.reshape(-1, self.width)).view(input.shape)  # type: ignore[no-any-return]


class LayerNorm(_Norm, module.LayerNorm):
    """`te.LayerNorm`, over one or several dimensions."""


class RMSNorm(_Norm, module.RMSNorm):
    """`te.RMSNorm`, over one or several dimensions."""


class Bias(FusibleOperation):
    """x + bias, (size,)."""

    def __init__(self, size: int, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size, device=device_for(device), dtype=dtype))

    def forward(self, input: Tensor) -> Tensor:
        """(..., size) -> (..., size)."""
        return input + self.bias.to(input.dtype)


class Identity(nn.Identity, FusibleOperation):
    """x."""


class Dropout(nn.Dropout, FusibleOperation):
    """torch.nn.Dropout."""


class ConstantScale(FusibleOperation):
    """x times a number."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        """(...) -> (...)."""
        return input * self.scale


class Reshape(FusibleOperation):
    """x in another shape."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)

    def forward(self, input: Tensor) -> Tensor:
        """(...) -> shape."""
        return input.reshape(self.shape)


class Quantize(FusibleOperation):
    """Casts x, or its gradient, by the recipe of the autocast; without one it is the identity.

    Example:
        >>> import ottava.compat.transformer_engine.pytorch as te
        >>> with te.autocast(recipe=te.quantization.MXFP8BlockScaling()):
        ...     print(type(Quantize()(torch.ones(32, 32))).__name__)
        MXFP8Tensor
    """

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self.casts = tuple(name for name, on in (("forward", forward), ("backward", backward)) if on)

    def forward(self, input: Tensor) -> Tensor:
        """(...) -> (...)."""
        if not FP8GlobalStateManager.is_fp8_enabled():
            return input
        there, back = (partial(self._cast, m, FP8GlobalStateManager.get_fp8_recipe()) for m in ("forward", "backward"))
        return mapped(there, back, input)  # type: ignore[no-any-return]

    def _cast(self, mode: str, recipe: Any, x: Tensor) -> Tensor:
        if mode not in self.casts or isinstance(x, QuantizedTensor):
            return x.view_as(x)
        roles = [QuantizerRole("linear", "input" if mode == "forward" else "grad_output")]
        made: Tensor = RecipeState.create(recipe, mode=mode, device=x.device, roles=roles).make_quantizers()[0](x)
        return made


class AddExtraInput(nn.Identity, FusibleOperation):
    """x + y, the end of a residual connection; neither is written, whatever in_place says."""

    num_extra_inputs = 1

    def forward(self, input: Tensor, extra: Tensor) -> Tensor:  # type: ignore[override]  # an extra input
        """x, y -> x + y."""
        return input + extra


class MakeExtraOutput(nn.Identity, FusibleOperation):
    """x twice, the start of a residual connection."""

    num_extra_outputs = 1

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # an extra output
        """x -> x, x."""
        return input, input.view_as(input)


class _Activated(FusibleOperation):
    """An activation; gated ones take the gate first. cache_quantized_input: the backward keeps FP8 codes."""

    name = ""

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        kept: Any = "fp8" if cache_quantized_input else "bf16"
        self.formula = ActivationFormula(activation_for(type(self).__name__, self.name, None), kept)

    def forward(self, input: Tensor) -> Tensor:
        """(..., F or 2 F) -> (..., F)."""
        return produced(self.formula, autocast_input(input))


_KINDS = ("GELU", "GEGLU", "GLU", "QGELU", "QGEGLU", "ReLU", "ReGLU", "SReLU", "SReGLU", "SiLU", "SwiGLU")


@functools.cache
def _activated(name: str) -> type[_Activated]:
    return type(name, (_Activated,), {"name": name.lower(), "__doc__": _Activated.__doc__})


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name in _KINDS:
        return _activated(name)
    return absent(f"ops.{name}", "write it as a module; te.ops.Sequential takes any")
