"""Checks that codes, scale, tensor and amax history agree at a door.

A cast in any recipe rounds each element to a neighbouring number of its format. The element therefore lies within one
step of the number that its code decodes to. If many elements do not, the operand is a cast of some other tensor, and
the pattern tells which bug it is:

    stored_scale      codes times some other factor would fit: the scale changed without a new cast
    row_col           the operand of x fits and the operand of x.T does not, or the other way round
    stale_weight      neither operand of a weight fits: both are casts of an earlier weight
    wrong_tensor      neither operand of an input or gradient fits
    nonfinite_scale   a stored scale is infinite or NaN
    history_twice     the amax history has every entry twice

Source: the signatures of TransformerEngine #1047, #738, #539, PR #1121; transformers #47030; torchao #3356.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ottava.engine.quantizer import Quantizer
from ottava.measure.sample import take_bands_of
from ottava.numerics.tensor import QuantizedTensor

Facts = dict[str, Any]
"""Facts of an event "check": check, layer, tensor, value, ..."""

_CREEP = 2.0**-6  # two steps of BF16
_ROWS, _COLS = 32, 256
"""A check reads this corner of an operand; 8,192 elements tell a wrong cast from a right one."""
_FIRST, _THEN = 4, 8
"""Checks run at the first 4 looks at a tensor, then at one look in 8, because a broken door stays broken."""
_TOLERATED = 1e-3
"""Tolerated share of elements beyond one step: exactly 0 in theory, more for scales stored with fewer digits."""
_SLACK = 1e-4
"""Relative tolerance: a stored fp32 reciprocal, or NVFP4's twice rounded scales, move a number by less."""
_LEAST_PAIRS = 3


class Checks:
    """Checks the operands of casts and calls `report` once for each failed check of a tensor.

    Args:
        report: gets the facts of an event "check".

    Example:
        >>> import ottava
        >>> found = []
        >>> checks, door = Checks(found.append), Quantizer()
        >>> spec = ottava.QuantizationSpec(ottava.E4M3)
        >>> x = torch.linspace(-1, 1, 64).reshape(4, 16)
        >>> row, col = door(x, spec, spec)
        >>> checks("fc1", "weight", door, x, row, col)
        >>> found
        []
        >>> checks("fc1", "weight", door, x.flip(0), row, col)      # the weight has changed, its codes have not
        >>> [(fact["check"], fact["value"]) for fact in found]
        [('stale_weight', 100.0)]
    """

    def __init__(self, report: Callable[[Facts], None]) -> None:
        self.report = report
        self._reported: set[tuple[str, str, str]] = set()
        self._looks: Counter[tuple[str, str]] = Counter()

    def __call__(self, layer: str, tensor: str, door: Quantizer, x: Tensor, row: Any, col: Any) -> None:
        """Checks one cast: x (R, C), the operand of x and the operand of x.T, each of which may be None or not cast."""
        looks = self._looks[layer, tensor] = self._looks[layer, tensor] + 1
        if looks > _FIRST and looks % _THEN:
            return
        for facts in (check_operands(tensor, x, row, col), check_history(door)):
            if facts is None or (key := (layer, tensor, facts["check"])) in self._reported:
                continue
            self._reported.add(key)
            self.report({"layer": layer, "tensor": tensor, **facts})


@torch.no_grad()
def check_operands(tensor: str, x: Tensor, row: Any, col: Any) -> Facts | None:
    """Checks that both operands are casts of x.

    Args:
        tensor: input, weight or grad_output.
        x: (R, C) before the cast.
        row, col: operands of x (R, C) and x.T (C, R); only a QuantizedTensor is checked.
    Returns:
        None, or the facts of an event: "value" is the share of elements [%] beyond one step.
    """
    both = [("row", x, row)]
    if row is None or col is None or row.data.data_ptr() != col.data.data_ptr():  # otherwise one cast serves both
        both.append(("col", x.t(), col))
    sides = [
        (name, *_sampled(operand.transformed(matrix), operand))
        for name, matrix, operand in both
        if isinstance(operand, QuantizedTensor) and operand.data.numel()
    ]
    for name, _, operand in sides:
        broken = ~operand.scale_inv.isfinite()
        if bool(broken.any()):
            share = 100 * float(broken.to(torch.float32).mean())
            return {"check": "nonfinite_scale", "direction": name, "value": round(share, 3), "unit": "% of scales"}
    wrong = {name: share_beyond_a_step(matrix, operand) for name, matrix, operand in sides}
    bad = [name for name, share in wrong.items() if share > _TOLERATED]
    if not bad:
        return None
    facts: Facts = {"direction": bad[0], "value": round(100 * wrong[bad[0]], 1), "unit": "% of elements"}
    matrix, operand = next((m, o) for name, m, o in sides if name == bad[0])
    factor = _best_factor(matrix, operand)
    if factor is not None:
        return {"check": "stored_scale", "factor": factor, **facts}
    if len(bad) < len(sides):
        return {"check": "row_col", **facts}
    return {"check": "stale_weight" if tensor == "weight" else "wrong_tensor", **facts}


def share_beyond_a_step(x: Tensor, x_q: QuantizedTensor) -> float:
    """Share of the non-zero finite elements whose decoded code is further away than rounding allows.

    Clipped elements, and blocks whose scale is 0, are left out.

    Example:
        >>> import ottava
        >>> x = torch.randn(64, 64)
        >>> x_q = ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3))
        >>> share_beyond_a_step(x, x_q), share_beyond_a_step(1.2 * x, x_q) > 0.9
        (0.0, True)
    """
    fmt, shape = x_q.spec.format, (x.shape[0], x.shape[1])
    scale_inv = x_q.spec.granularity.expand(x_q.scale_inv, shape).to(torch.float32)
    x = x.to(torch.float32)
    magnitude = x.abs()
    usable = x.isfinite() & (scale_inv > 0) & (magnitude <= fmt.max * scale_inv) & (magnitude > 0)
    # neighbours are one step apart: rounding to nearest moves an element by half a step, stochastic rounding by one
    # a scale that was corrected after the rounding (ms_eden) moves it by a share of itself, too
    part = 0.5 if x_q.spec.rounding == "nearest_even" and x_q.spec.block_scale != "ms_eden" else 1.0
    step = torch.maximum(magnitude * fmt.eps, scale_inv * math.ldexp(fmt.eps, fmt.emin))
    distance = (x - x_q.dequantize(torch.float32)).abs()
    beyond = (distance > part * step * (1 + _SLACK)) & usable
    return float(beyond.sum()) / max(float(usable.sum()), 1.0)


def check_history(door: Quantizer) -> Facts | None:
    """Checks that the amax history of a door does not have every entry twice, because it rolled twice in each step.

    The check fails only if all pairs are equal and neighbouring pairs differ: an input that never changes fills the
    history with one number.
    """
    history = getattr(door, "amax_history", None)
    if not isinstance(history, Tensor):
        return None
    entries = [value for value in history.tolist() if value > 0]
    for shift in (0, 1):  # the newest entry may stand alone
        pairs = list(zip(entries[shift::2], entries[shift + 1 :: 2], strict=False))
        if len(pairs) < _LEAST_PAIRS or any(a != b for a, b in pairs):
            continue
        # an amax that creeps is the same in two steps by chance, in BF16
        distinct = sum(abs(a[1] - b[0]) > _CREEP * max(a[1], b[0]) for a, b in itertools.pairwise(pairs))
        if distinct * 2 > len(pairs) - 1:
            return {"check": "history_twice", "value": float(len(pairs)), "unit": "pairs of equal entries"}
    return None


def _sampled(x: Tensor, x_q: QuantizedTensor) -> tuple[Tensor, QuantizedTensor]:
    """The same corner of both."""
    if x.shape[0] > _ROWS:
        x, x_q = x[:_ROWS], take_bands_of(x_q, [range(_ROWS)])
    if x.shape[1] > _COLS:
        width = x_q.spec.granularity.cols
        scale_inv = x_q.scale_inv if width is None else x_q.scale_inv[:, : -(-_COLS // width)]
        x, x_q = x[:, :_COLS], QuantizedTensor(x_q.data[:, :_COLS], scale_inv, x_q.spec, x_q.dtype)
    return x, x_q


def _best_factor(x: Tensor, x_q: QuantizedTensor) -> float | None:
    """The factor by which the stored scale is wrong (median over blocks), if the codes would fit with another scale.

    Each block gets a factor of its own, because rounding to a power of two moves each scale by another factor.
    """
    granularity, shape = x_q.spec.granularity, (x.shape[0], x.shape[1])
    q, x = x_q.dequantize(torch.float32), x.to(torch.float32)
    finite = x.isfinite()
    product = torch.where(finite, x * q, 0.0)
    square = torch.where(finite, q * q, 0.0)
    top, bottom = (granularity.blocks(t.contiguous()).sum(dim=(1, 3), dtype=torch.float64) for t in (product, square))
    factors = torch.where(bottom > 0, top / torch.where(bottom > 0, bottom, 1.0), 1.0)
    if not bool((factors > 0).all()):
        return None
    fitted = (x_q.scale_inv.to(torch.float64) * factors).to(torch.float32)
    if x_q.spec.scale_format in ("pow2", "e8m0", "e8m0_floor"):
        # these codes were cast with a power of two; if only another factor fits, they belong to another tensor
        fitted = torch.exp2(fitted.log2().round())
    corrected = QuantizedTensor(x_q.data, fitted.reshape(x_q.scale_inv.shape), x_q.spec, x_q.dtype)
    wide = granularity.expand(fitted.reshape(x_q.scale_inv.shape), shape)
    noise = torch.where(finite, x - corrected.dequantize(torch.float32), 0.0).to(torch.float64)
    signal = torch.where(finite, x, 0.0).to(torch.float64)
    # a cast of x has an error of half a step at any scale; a cast of another tensor has far more
    limit = (x_q.spec.format.eps / 2) ** 2 * signal.square().sum() + (
        (wide.to(torch.float64) * math.ldexp(x_q.spec.format.eps, x_q.spec.format.emin)).square().expand(shape).sum()
        / 4
    )
    if float(noise.square().sum()) > float(limit):
        return None
    off = factors[(factors - 1).abs() > 0.02]
    return round(float(off.median()), 4) if off.numel() else None
