"""Batch invariance: the bits of a row depend on no other row, so on neither batch, padding nor cuts of a sequence.

A cast keeps the rule if no scale and no random bit is shared by rows; a GEMM if each element of y is one sum over k in
one order, whatever the number of rows. `native_gemm` has that walk; kernels that choose tiles, or their number, by M do
not. Elementwise functions keep it in tiles of one size: torch runs the ends of a tensor by other code than its middle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import GEMMS, Recipe

LANES = 64
"""Rows of a multiple of this many elements have no end inside a vector register."""
_TILE = 32_768
"""Elements of a tile; torch gives a thread no fewer."""


@functools.lru_cache(maxsize=256)
def made_invariant(recipe: Recipe) -> Recipe:
    """A resolved recipe whose GEMMs are batch invariant.

    Raises:
        ValueError: rows share a scale, or random bits.

    Example:
        >>> from ottava.recipe import RECIPES
        >>> made_invariant(RECIPES["rowwise"]).name
        'rowwise/batch_invariant'
        >>> made_invariant(RECIPES["tensorwise"])
        Traceback (most recent call last):
        ValueError: recipe 'tensorwise' cannot be batch invariant: fprop.lhs is E4M3[tensor], and rows share its scale.
        Take a recipe with scales for rows or blocks of a row, such as 'rowwise', 'blockwise' or 'mxfp8'
    """
    for gemm in ("fprop", "dgrad"):  # the gradient of a weight is a sum over rows
        spec = getattr(recipe, gemm).lhs
        if reason := "" if spec is None else _shared(spec):
            raise ValueError(
                f"recipe {recipe.name!r} cannot be batch invariant: {gemm}.lhs is {spec}, and {reason}.\n"
                "Take a recipe with scales for rows or blocks of a row, such as 'rowwise', 'blockwise' or 'mxfp8'"
            )
    gemms = {gemm: replace(getattr(recipe, gemm), batch_invariant=True) for gemm in GEMMS}
    return replace(recipe, name=f"{recipe.name}/batch_invariant", **gemms)


def _shared(spec: QuantizationSpec) -> str:
    """What rows share in a cast; "" if nothing."""
    if spec.granularity.rows != 1:
        return "rows share its scale"
    if spec.scale_format == "e4m3":
        return "its scales of blocks share one of the tensor"
    if spec.transform is not None:
        return f"rows share the numbers of its transform ({spec.transform})"
    return "random bits depend on the place of a row" if spec.rounding == "stochastic" else ""


def in_tiles(function: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """An elementwise function of rows (..., K), in tiles of one number of rows.

    Args:
        function: operands (T, K_i) -> (T, K); elementwise within a row.
        operands: of equal leading dimensions.

    Example:
        >>> x = torch.randn(5, 64)
        >>> torch.equal(in_tiles(torch.exp, x)[3:], in_tiles(torch.exp, x[3:]))
        True
    """
    leading = operands[0].shape[:-1]
    rows = [x.reshape(-1, x.shape[-1]) for x in operands]
    count, wide = rows[0].shape[0], max(x.shape[-1] for x in rows)
    whole = all(x.shape[-1] % (2 * LANES) == 0 for x in rows)  # also in the halves of a gated activation
    tile = max(1, _TILE // max(wide, 1)) if whole else 1
    if short := -count % tile:
        rows = [torch.nn.functional.pad(x, (0, 0, 0, short)) for x in rows]
    made = [function(*(x[i : i + tile].contiguous() for x in rows)) for i in range(0, max(count, 1), tile)]
    y = (torch.cat(made) if len(made) > 1 else made[0])[:count]
    return y.view(*leading, y.shape[-1])
