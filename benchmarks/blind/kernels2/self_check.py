"""Shows that each wrong kernel is wrong on some input, and no right one is: `python self_check.py [NAME ...]`.

The checks are those of the older set (`../kernels/self_check.py`), and two more for codes of four bits.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "kernels"))
spec = importlib.util.spec_from_file_location("older", HERE.parent / "kernels" / "self_check.py")
assert spec is not None and spec.loader is not None
older = importlib.util.module_from_spec(spec)
spec.loader.exec_module(older)
older.HERE = HERE
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def check_gemm(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """As the older check; codes of four bits have a product of their own, from a table typed here."""
    if what["recipe"] not in ("mxfp4", "nvfp4"):
        yield from older_gemm(run, what)
        yield from more_gemms(run, what)
        return
    torch.manual_seed(8)
    block, rows = (16, 16) if what["recipe"] == "nvfp4" else (32, 1)
    for m, n, k in ((16, 16, 64), (20, 70, 96), (17, 33, 160), (64, 48, 256)):
        a, b = (torch.randint(0, 16, (r, k), dtype=torch.uint8) for r in (m, n))
        grid_b = (-(-n // rows), k // block)
        if block == 16:
            sa, sb = torch.rand(m, k // 16) + 0.1, torch.rand(grid_b) + 0.1
            wide_a, wide_b = sa.double(), sb.double()
        else:
            sa, sb = (torch.randint(120, 134, s).to(torch.uint8) for s in ((m, k // 32), grid_b))
            wide_a, wide_b = (torch.exp2(s.double() - 127) for s in (sa, sb))
        x = VALUES[a.long()] * wide_a.repeat_interleave(block, 1)
        y = VALUES[b.long()] * wide_b.repeat_interleave(block, 1).repeat_interleave(rows, 0)[:n]
        right, dtype = x @ y.t(), getattr(torch, what["out"])
        out, stands = older.guarded((m, n), dtype)
        got: Tensor | None = run(a, b, sa, sb, out)
        bound = (k + 8) * 2.0**-24 * (x.abs() @ y.abs().t()) + older.half_ulp(right, dtype)
        yield f"{m} x {n} x {k}", older.near(out if got is None else got, right, bound) and stands()


def check_decode(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    if what["format"] != "e2m1":
        yield from older_decode(run, what)
        return
    codes = torch.arange(16, dtype=torch.uint8)
    yield "all codes", older.same(run(codes), VALUES)


def more_gemms(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """A square b, large scales, and under MX a scale byte of 255."""
    recipe, dtype = what["recipe"], getattr(torch, what["out"])
    torch.manual_seed(9)
    for kind in ("square", "large scales", "255"):
        a, b = older.codes_for(20, 64, "normal"), older.codes_for(64, 64, "normal")
        sa, sb = older.scales_for(20, 64, recipe, False), older.scales_for(64, 64, recipe, True)
        if kind == "255" and recipe == "mxfp8":
            sa[3, 1] = 255
        if kind == "large scales" and recipe != "mxfp8":
            sa = sa * 2.0**20
        out, stands = older.guarded((20, 64), dtype)
        got = run(a, b, sa, sb, out)
        x, y = older.operands(a, b, sa, sb, recipe)
        right = older.product(a, b, sa, sb, recipe)
        bound = 72 * 2.0**-24 * (x.abs().nan_to_num(0.0) @ y.abs().nan_to_num(0.0).t()) + older.half_ulp(right, dtype)
        yield kind, older.near(out if got is None else got, right, bound) and stands()


def check_encode(run: Callable[..., Any], what: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Stochastic codes are neighbours of x, and their mean is x within 6 standard errors of 2,000 draws."""
    if what.get("rounding") != "stochastic":
        yield from older_encode(run, what)
        return
    torch.manual_seed(10)
    x = torch.rand(200) * 400
    numbers = older.decode(torch.arange(127, dtype=torch.uint8), older.E4M3)
    place = torch.searchsorted(numbers, x.double()).clamp(1, 126)
    step = numbers[place] - numbers[place - 1]
    draws = torch.stack([older.decode(run(x).view(torch.uint8), older.E4M3) for _ in range(2000)])
    yield "neighbours", bool(((draws - x.double()).abs() <= step).all())
    error = ((draws - x.double()) / step).mean()
    yield "mean", bool(error.abs() < 6 * 0.5 / (200 * 2000) ** 0.5)


older_encode = older.CHECKS["encode"]
older_gemm, older_decode = older.CHECKS["gemm"], older.CHECKS["decode"]
older.CHECKS.update(gemm=check_gemm, decode=check_decode, encode=check_encode)

if __name__ == "__main__":
    sys.exit(older.main(sys.argv[1:]))
