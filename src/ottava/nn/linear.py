"""A `torch.nn.Linear` whose three GEMMs run under a recipe.

It is a subclass with the same Parameters, so optimizers, PEFT, FSDP, checkpoints and `isinstance` work unchanged. Its
recipe comes from `convert` or the constructor; an `autocast` around the call overrides it.
"""

from __future__ import annotations

import torch
from torch import nn

from ottava.nn.layer import Layer
from ottava.recipe import Recipe, get_recipe


class Linear(Layer, nn.Linear):
    """`torch.nn.Linear` under a recipe.

    Args:
        recipe: a Recipe or its name; the other arguments are torch's.
    Shapes: input (..., in_features) -> (..., out_features), any sizes; the layer zero-pads sizes where hardware needs
        multiples. dtypes: float32, bfloat16, float16; under torch.autocast it first casts the input, as torch does.
    Raises:
        ValueError: unknown recipe.
        TypeError: outside torch.autocast, an input whose dtype is not the weight's; torch raises there, too.
        NotImplementedError: a second derivative of a layer that did not run torch's linear.
    Edge cases: `autocast(enabled=False)` runs torch's linear, bit for bit. So does a recipe (or an override) in high
        precision, with one exception: if another BF16 GEMM is faster than torch's on this CPU (mostly one without BF16
        units), that GEMM multiplies plain BF16 tensors in eager code, with fp32 sums and one rounding, and the receipt
        names it. Recomputation by torch.utils.checkpoint uses the recipe of the layer's last forward.

    Example:
        >>> import ottava
        >>> layer = ottava.nn.Linear(64, 32, recipe="tensorwise", dtype=torch.bfloat16)
        >>> layer(torch.ones(2, 64, dtype=torch.bfloat16)).shape, list(layer.state_dict())
        (torch.Size([2, 32]), ['weight', 'bias'])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | str = "tensorwise",
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.adopt(get_recipe(recipe), name="")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def extra_repr(self) -> str:
        """torch's, and the recipe."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}"
