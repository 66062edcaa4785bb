"""The contract of a quantized layer: what state, receipt, calibration, tuning, planning, watch and replay speak to.

Whatever casts for a GEMM of its own is one of these: a Linear, a norm with a linear behind it, experts. How such a
layer runs is in `nn.layer`; nothing below needs to know.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ottava.functional import Call
from ottava.ops import GemmPlan
from ottava.quantizer import LinearQuantizers
from ottava.recipe import Recipe


class QuantizedLayer(nn.Module):
    """A module whose GEMMs run as a recipe says, with three doors of its own."""

    name: str
    """Full name in the converted model, which override patterns are matched against."""
    recipe: Recipe
    """As given to `convert`, overrides included."""
    resolved: Recipe
    """The recipe with this layer's overrides applied."""
    quantizers: LinearQuantizers
    """The doors of its input, weight and gradient."""
    plans: dict[Any, GemmPlan]
    """How its GEMMs are made, as far as they have been."""
    last_call: Call | None
    """What its last forward and backward ran; None: nothing yet."""
    scaling_state: Any
    """The `state.ScalingState` that says when predicted scales move on; shared by the layers of a model."""
    weight: Tensor
    """(N, K), or as its module keeps it."""
    bias: Any
    """(N,) or None."""
    in_features: int
    """K."""
    out_features: int
    """N."""

    @property
    def parameter(self) -> Tensor:
        """What an optimizer holds: the weight, or the parameter that it is a piece of."""
        return self.weight

    def adopt(self, recipe: Recipe, name: str) -> None:
        """Takes a recipe and its full name in the model."""
        raise NotImplementedError(f"{type(self).__name__}.adopt")


def quantized_layers(model: nn.Module) -> list[QuantizedLayer]:
    """Those of a model, in the order of its modules.

    Example:
        >>> import ottava
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        >>> report = ottava.convert(model, "tensorwise")
        >>> [layer.name for layer in quantized_layers(model)]
        ['0']
    """
    return [module for module in model.modules() if isinstance(module, QuantizedLayer)]
