"""Matrices of every layout: one number, odd, whole blocks, transposed, strided, expanded, empty."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def tiles(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Random numbers; 8 x 8 tiles differ in magnitude by up to 2**20; zero, -0 and a subnormal are among them."""
    exponents = torch.randint(-12, 9, (-(-rows // 8), -(-cols // 8)))
    magnitudes = torch.exp2(exponents.double()).repeat_interleave(8, 0).repeat_interleave(8, 1)[:rows, :cols]
    x = (torch.randn(rows, cols, dtype=torch.float64) * magnitudes).to(dtype)
    if x.numel() > 3:
        x.view(-1)[:3] = torch.tensor([0.0, -0.0, torch.finfo(dtype).smallest_normal / 2])
    return x


LAYOUTS: Mapping[str, Callable[[torch.dtype], Tensor]] = {
    "1x1": lambda dtype: tiles(1, 1, dtype),
    "1x300": lambda dtype: tiles(1, 300, dtype),
    "300x1": lambda dtype: tiles(300, 1, dtype),
    "odd 37x131": lambda dtype: tiles(37, 131, dtype),
    "multiple 128x256": lambda dtype: tiles(128, 256, dtype),
    "transposed 131x37": lambda dtype: tiles(37, 131, dtype).t(),
    "strided 19x44": lambda dtype: tiles(37, 131, dtype)[::2, 1::3],
    "expanded 5x64": lambda dtype: tiles(1, 64, dtype).expand(5, 64),
    "empty 0x5": lambda dtype: tiles(0, 5, dtype),
    "empty 5x0": lambda dtype: tiles(5, 0, dtype),
    "empty 0x0": lambda dtype: tiles(0, 0, dtype),
}
