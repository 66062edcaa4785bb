"""A norm and the linear behind it as one layer: the norm hands its rows to the cast, and the layer never keeps them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ottava.nn.layer import Layer
from ottava.nn.norms import NormName, make_norm
from ottava.recipe import Recipe, get_recipe


class NormLinear(Layer, nn.Linear):
    """linear(norm(x)) under a recipe; one backward, in which the normed rows live as codes only.

    Args:
        norm: "layernorm" or "rmsnorm"; eps, zero_centered_gamma: of the norm, see `LayerNorm`.
        bias: of the linear; a LayerNorm always has its own bias.
        recipe: a Recipe or its name; device, dtype: torch's.
        return_norm_output: return (y, normed rows); the norm then runs alone, and the rows live as long as the caller
            keeps them.
    Shapes: input (..., in_features) -> (..., out_features), any sizes. dtypes: float32, bfloat16, float16; under
        torch.autocast the norm reads the input in its own dtype and rounds its rows to autocast's dtype.
    Parameters: weight, bias, norm.weight, norm.bias. State dicts and optimizers see the norm as a module, but hooks on
        it do not run, because the linear makes its rows.
    Raises: as `Linear` and `LayerNorm`.
    Edge cases: a recipe that casts nothing runs the norm and torch's linear.

    Example:
        >>> import ottava
        >>> layer = ottava.nn.NormLinear(64, 32, norm="rmsnorm", bias=False, dtype=torch.bfloat16)
        >>> layer(torch.ones(2, 64, dtype=torch.bfloat16)).shape, list(layer.state_dict())
        (torch.Size([2, 32]), ['weight', 'norm.weight'])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        norm: NormName = "layernorm",
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        bias: bool = True,
        recipe: Recipe | str = "tensorwise",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        return_norm_output: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.norm = make_norm(
            norm, in_features, eps=eps, zero_centered_gamma=zero_centered_gamma, device=device, dtype=dtype
        )
        self.return_norm_output = return_norm_output
        self.produce = None if return_norm_output else self.norm.formula
        self.adopt(get_recipe(recipe), name="")

    def produced_with(self) -> tuple[Tensor | None, ...]:
        """The norm's weight and, for a LayerNorm, its bias."""
        return self.norm.producer_parameters()

    def forward(self, input: Tensor, *more: Any) -> Any:
        """(..., in_features) -> (..., out_features), or (that, the normed rows) with return_norm_output."""
        if not self.return_norm_output:
            return super().forward(input, *more)
        rows = self.norm(input)
        return super().forward(rows, *more), rows

    def extra_repr(self) -> str:
        """torch's, and the recipe."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}"
