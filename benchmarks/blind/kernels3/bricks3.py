"""What the adapters of this folder stand on: the right blocks of ../kernels, NVFP4 beside them, and three ways to store."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent / "kernels"))

from blocks import (  # noqa: E402
    E2M1, E4M3, E4M3FNUZ, E5M2, Cell, Format, adapter, adamw, amax_of, attention, backward, cast, cell, codes_of, decode, encode,
    finish, groups, layout, linear_gemm, magnitudes, octaves_of, of_group, power, probabilities, product, read_scales, round_to,
    rows_of, scaled, scales_of, spread, table, truncate_to, uncast,
)

__all__ = [
    "E2M1", "E4M3", "E4M3FNUZ", "E5M2", "Cell", "Format", "adapter", "adamw", "amax_of", "attention", "backward", "bytes_of", "cast", "cell",
    "codes_of", "decode", "encode", "finish", "four_bits", "groups", "hand", "layout", "linear_gemm", "magnitudes", "octaves_of",
    "of_group", "power", "probabilities", "product", "put", "read_scales", "round_to", "rows_of", "scaled", "scales_of", "sides",
    "spread", "table", "truncate_to", "uncast", "wide",
]


def bytes_of(codes: Tensor) -> Tensor:
    """Codes as int64."""
    return (codes if codes.dtype == torch.uint8 else codes.contiguous().view(torch.uint8)).to(torch.int64)


def hand(data: Tensor, scale_inv: Tensor, codes: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Writes both results of a cast into their buffers."""
    data.view(torch.uint8).copy_(codes.contiguous().view(torch.uint8))
    scale_inv.copy_(inverse.reshape(scale_inv.shape))
    return data, scale_inv


def put(out: Tensor, y: Tensor) -> Tensor:
    """Writes a product, rounded to the dtype of the output."""
    out.copy_(y)
    return out


def sides(recipe: str) -> tuple[Cell, Cell]:
    """The cells of both operands of a GEMM."""
    if recipe == "nvfp4":
        return Cell(E2M1, 1, 16, "fp32"), Cell(E2M1, 16, 16, "fp32")
    return cell(recipe, "x"), cell(recipe, "weight")


def wide(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, recipe: str) -> tuple[Tensor, Tensor]:
    """Both operands as numbers, fp64."""
    side_a, side_b = sides(recipe)
    wide_a = decode(a) * spread(read_scales(scale_a), (a.shape[0], a.shape[1]), side_a)
    return wide_a, decode(b) * spread(read_scales(scale_b), (b.shape[0], b.shape[1]), side_b)


def four_bits(x: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of NVFP4: the amax of each block, and of all; the block's scale (to be rounded to E4M3) in units of the tensor's."""
    how = Cell(E2M1, rows, 16, "fp32")
    amax = amax_of(x, how).double()
    top = x.float().abs().amax().double() if x.numel() else torch.zeros((), dtype=torch.float64)
    top = torch.where((top > 0) & top.isfinite(), top, 1.0)
    return amax, top, amax / 6 * (2688 / top)
