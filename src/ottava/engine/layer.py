"""The interface of a quantized layer for state, receipt, calibration, tuning, planning, watch and replay.

Every layer that casts for a GEMM implements it: a Linear, a norm with a linear behind it, experts.
`nn.layer` runs such a layer.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ottava.engine.functional import Call
from ottava.engine.quantizer import LinearQuantizers
from ottava.ops.gemm import GemmPlan
from ottava.recipe import Recipe


class QuantizedLayer(nn.Module):
    """A module with three doors whose GEMMs run under a recipe."""

    name: str
    """Full name in the converted model; override patterns match it."""
    recipe: Recipe
    """As given to `convert`, overrides included."""
    resolved: Recipe
    """The recipe with this layer's overrides applied."""
    quantizers: LinearQuantizers
    """The doors of its input, weight and gradient."""
    plans: dict[Any, GemmPlan]
    """The plans of its GEMMs so far."""
    last_call: Call | None
    """Its last forward and backward; None: nothing has run yet."""
    scaling_state: Any
    """The `state.ScalingState` that decides when predicted scales change; the layers of a model share it."""
    weight: Tensor
    """(N, K), or in the layout of its module."""
    bias: Any
    """(N,) or None."""
    in_features: int
    """K."""
    out_features: int
    """N."""

    @property
    def parameter(self) -> Tensor:
        """The parameter that an optimizer holds: the weight, or the larger parameter with this piece."""
        return self.weight

    def adopt(self, recipe: Recipe, name: str) -> None:
        """Takes a recipe and its full name in the model."""
        raise NotImplementedError(f"{type(self).__name__}.adopt")


def quantized_layers(model: nn.Module) -> list[QuantizedLayer]:
    """The quantized layers of a model, in the order of its modules.

    Example:
        >>> import ottava
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        >>> report = ottava.convert(model, "tensorwise")
        >>> [layer.name for layer in quantized_layers(model)]
        ['0']
    """
    # the order of modules is that of ranks too: a place in an all-reduce stands for a layer
    return [module for module in model.modules() if isinstance(module, QuantizedLayer)]
