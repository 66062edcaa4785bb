"""What a cast did to a tensor, from sums that merge exactly over calls, micro-batches and ranks.

A `Tally` holds sufficient statistics; a `Statistic` turns one into a number. Adding a statistic is adding one entry to
`STATISTICS`. With x the tensor before the cast, q the dequantized one and e = x - q:

    See = sum e**2    Sxx = sum x**2    Sxe = sum x*e    a = Sxe / Sxx    b = See / Sxx
    mse = See / n     sqnr_db = -10 log10 b     cosine = (1 - a) / sqrt(1 - 2a + b)

so that the cosine is never the quotient of two nearly equal sums, which leaves 4 digits in fp32. Non-finite elements
are counted and left out of every sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

import torch
from torch import Tensor

from ottava.quantized_tensor import QuantizedTensor


@dataclass(frozen=True)
class Tally:
    """Sufficient statistics of one tensor; `+` merges two."""

    n: float = 0.0
    """Finite elements."""
    n_nonfinite: float = 0.0
    """Infinities and NaNs before the cast."""
    n_nonzero: float = 0.0
    """Finite elements that are not 0."""
    n_underflow: float = 0.0
    """Of these, cast to 0."""
    n_overflow: float = 0.0
    """Beyond the largest number of the format by more than its rounding range: clipped."""
    sxx: float = 0.0
    """Sum of x**2."""
    see: float = 0.0
    """Sum of e**2."""
    sxe: float = 0.0
    """Sum of x * e."""
    amax: float = 0.0
    """Largest finite magnitude."""

    def __add__(self, other: Tally) -> Tally:
        merged = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Tally(**{**merged, "amax": max(self.amax, other.amax)})


def measure(x: Tensor, x_q: QuantizedTensor) -> Tally:
    """The tally of one cast. x (R, C) before it; sums in fp64. Reads numbers back from the device: not for a hot path.

    Example:
        >>> import ottava
        >>> x = torch.tensor([[1.0, 1e-9, 0.0, 448.0]])
        >>> tally = measure(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3)))
        >>> tally.n_nonzero, tally.n_underflow, tally.amax
        (3.0, 1.0, 448.0)
    """
    fmt = x_q.spec.format
    finite = x.isfinite()
    x64 = torch.where(finite, x, 0).to(torch.float64)
    q64 = torch.where(finite, x_q.dequantize(torch.float32), 0).to(torch.float64)
    scale_inv = x_q.spec.granularity.expand(x_q.scale_inv, (x.shape[0], x.shape[1])).to(torch.float64)
    step = math.ldexp(fmt.eps, fmt.emax)
    clip = fmt.max + step / 2  # up to half a step above the largest number rounds to it; the tie only if it is even
    clipped = torch.gt if fmt.max / step % 2 == 0 else torch.ge
    error = x64 - q64
    nonzero = x64 != 0
    sums = torch.stack(
        [
            finite.sum(dtype=torch.float64),
            (~finite).sum(dtype=torch.float64),
            nonzero.sum(dtype=torch.float64),
            (nonzero & (q64 == 0)).sum(dtype=torch.float64),
            # where even the scale of a block underflowed, an element is lost, not clipped
            (clipped(x64.abs(), clip * scale_inv) & (q64 != 0)).sum(dtype=torch.float64),
            x64.square().sum(),
            error.square().sum(),
            (x64 * error).sum(),
            x64.abs().max() if x64.numel() else x64.new_zeros(()),
        ]
    )
    return Tally(*sums.tolist())


@dataclass(frozen=True)
class Statistic:
    """One number from a tally."""

    name: str
    """Key in tables and files."""
    unit: str
    """Of the number."""
    meaning: str
    """One sentence."""
    finish: Callable[[Tally], float]
    """The number; NaN where the tally says nothing about it."""


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _sqnr_db(t: Tally) -> float:
    if not t.sxx:
        return math.nan
    return math.inf if t.see == 0 else -10 * math.log10(t.see / t.sxx)


def _cosine(t: Tally) -> float:
    if not t.sxx:
        return math.nan
    a, b = t.sxe / t.sxx, t.see / t.sxx
    norm = 1 - 2 * a + b  # |q|**2 / |x|**2
    return (1 - a) / math.sqrt(norm) if norm > 0 else math.nan


STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        s.name: s
        for s in (
            Statistic("amax", "of x", "largest magnitude before the cast", lambda t: t.amax),
            Statistic(
                "underflow_pct",
                "%",
                "non-zero elements that the cast turned into 0",
                lambda t: 100 * _ratio(t.n_underflow, t.n_nonzero),
            ),
            Statistic("overflow_pct", "%", "elements that the cast clipped", lambda t: 100 * _ratio(t.n_overflow, t.n)),
            Statistic("sqnr_db", "dB", "signal power over the power of the cast's error", _sqnr_db),
            Statistic("cosine", "", "cosine between the tensor and its cast", _cosine),
            Statistic("mse", "of x squared", "mean squared error of the cast", lambda t: _ratio(t.see, t.n)),
            Statistic("nonfinite", "elements", "infinities and NaNs before the cast", lambda t: t.n_nonfinite),
        )
    }
)
