"""The values at which a statistic of a cast is bad, by format; rules, floors, marks, triggers and colours use them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ottava.numerics.formats import Format

DECIBELS_A_BIT = 6.02
"""One more mantissa bit halves the error: so many dB of SQNR."""
PERCENT: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"underflow_pct": (1.0, 10.0), "overflow_pct": (1e-3, 1e-1)}
)
"""Shares of elements: above the first a cast deserves a look, above the second it is broken."""


@dataclass(frozen=True)
class Limit:
    """A statistic of a cast and the value at which it becomes bad."""

    metric: str
    """Name of the statistic."""
    unit: str
    limit: Callable[[Format], float]
    """The worst value that is still good."""
    above: bool
    """True: good values are at least the limit. False: at most."""

    def fails(self, values: Any, fmt: Format) -> Any:
        """Whether each value is bad; NaN, which means unknown, is not."""
        return values < self.limit(fmt) if self.above else values > self.limit(fmt)


def healthy_db(fmt: Format) -> float:
    """SQNR of a bell-shaped tensor that fits the range of the format, so that only rounding costs accuracy.

    Example:
        >>> from ottava.numerics.formats import E4M3, E5M2
        >>> round(healthy_db(E4M3), 2), round(healthy_db(E5M2), 2)
        (31.56, 25.54)
    """
    return 13.5 + DECIBELS_A_BIT * fmt.mantissa_bits


def warn_db(fmt: Format) -> float:
    """SQNR below which a cast deserves a look, about 6 dB below a healthy one: 25 dB in E4M3, 20 dB in E5M2."""
    return 10.0 + 5 * fmt.mantissa_bits


def critical_db(fmt: Format) -> float:
    """SQNR below which a cast is broken: 15 dB in E4M3, 12 dB in E5M2."""
    return 6.0 + 3 * fmt.mantissa_bits


def element_db(fmt: Format) -> float:
    """`warn_db` for an SQNR in which all elements weigh the same: there, 1 % of flushed elements alone gives 20 dB."""
    return warn_db(fmt) - 5


NOISE_DB = 12.0
"""SQNR below which a cast of any format is mostly noise: `critical_db` of E5M2."""


_GRADIENT = MappingProxyType({8: 0.15, 6: 0.25, 4: 0.58})
"""Four bits: a gradient below sqrt(3) times the noise of its casts trains worse (arXiv 2505.19115)."""


def flushed_limit(fmt: Format) -> float:
    """Percent of a tensor that underflows in a broken cast.

    Every number below a 24th of its block's largest is 0 in E2M1, a third of a healthy gradient: that is its rounding.

    Example:
        >>> from ottava.numerics.formats import E2M1, E4M3
        >>> flushed_limit(E4M3), flushed_limit(E2M1)
        (10.0, 50.0)
    """
    return 50.0 if fmt.bits <= 4 else PERCENT["underflow_pct"][1]


def gradient_level(bits: int) -> float:
    """The distance ||g_casts - g|| / ||g|| above which casts hurt, by the bits of the narrowest format.

    Example:
        >>> gradient_level(8), gradient_level(4)
        (0.15, 0.58)
    """
    return _GRADIENT.get(bits, _GRADIENT[8])


def gradient_hurts(
    error: float, noise: float | None, bias: float | None, bits: int, *, hidden: float | None = None
) -> bool:
    """Whether casts that move a gradient so far hurt: above its level, and not hidden by the noise of the batch.

    Args:
        error: ||g_casts - g|| / ||g||.
        noise: ||g_casts - g|| over the norm of the batch's own noise; None: unknown, and the level is twice as high.
        bias: the part along the gradient, over its norm; no noise hides a tenth.
        bits: of the narrowest format.
        hidden: noise below which nothing hurts; None: a half, where the casts add a quarter of the variance, as a batch
            that is a fifth smaller does, and 1 with four bits, whose users accept half a batch.

    Example:
        >>> [gradient_hurts(error, noise, -0.01, 8) for error, noise in ((0.16, 0.4), (0.24, 0.6), (0.24, None))]
        [False, True, False]
    """
    if noise is None or not math.isfinite(noise):
        return error > 2 * gradient_level(bits)
    hidden, biased = hidden or (1.0 if bits <= 4 else 0.5), abs(bias or 0.0)
    # what many batches do not average away has a level of its own
    far = error > gradient_level(bits) or (biased >= 0.25 and noise >= 0.5)
    return far and (noise >= hidden or biased >= 0.1)


SUSPICIOUS = 0.3
"""Noise from which casts deserve a search for the worst of them, and hurt if one does worse than rounding."""


def loss_taken(first: float, cast: float, exact: float, noise: float = 0.0) -> float:
    """The share of what training gained that casts take from the loss of one batch; 0 if it is not much.

    Not much is a fifth of the gain, 1 % of the loss, or anything before training has gained 5 % of its first loss. A
    loss below zero, as a policy gradient's, has no scale.

    Args:
        first: the loss that training began with.
        cast: the loss of the batch with casts.
        exact: without.
        noise: standard deviation of the loss from batch to batch.

    Example:
        >>> [round(loss_taken(5.0, cast, exact), 2) for cast, exact in ((2.75, 2.0), (2.1, 2.0), (4.9, 4.8))]
        [0.25, 0.0, 0.0]
    """
    cost, gain = cast - exact, first - exact
    if not (exact > 0 and cost > 0.01 * exact and gain > 0.05 * first):
        return 0.0
    share = cost / (gain + 2 * noise)
    return share if share >= 0.2 else 0.0


OVERSHOOTS = "the step made its own batch worse"
"""Why a step was tried that no schedule asked for: not every step of its kind is on record."""


def overshoots(trial: Mapping[str, Any], part: str = "tenth") -> bool:
    """Whether a step made its own batch worse by 2 %, and a part of it ("tenth", "thousandth") makes it better.

    Example:
        >>> overshoots({"loss": 2.0, "loss_after": 3.0, "loss_tenth": 1.9}), overshoots({"loss": 2.0})
        (True, False)
    """
    names = "loss", "loss_after", f"loss_{part}"
    loss, after, shorter = (float(x) if isinstance(x := trial.get(n), (int, float)) else math.nan for n in names)
    return math.isfinite(after) and after > loss + 0.02 * abs(loss) + 1e-6 and shorter < loss


def beyond_chance(failed: int, tried: int, by_chance: float = 0.25, risk: float = 0.02) -> bool:
    """Whether so many trials of a healthy training would fail in few trainings only: a binomial bound.

    Args:
        failed, tried: numbers of trials.
        by_chance: how often one trial of a healthy training fails at most.
        risk: the largest share of healthy trainings about which this may be wrong.

    Example:
        >>> [beyond_chance(k, n) for k, n in ((2, 2), (3, 3), (3, 4), (4, 5))]
        [False, True, False, True]
    """
    ways = (math.comb(tried, k) * by_chance**k * (1 - by_chance) ** (tried - k) for k in range(failed, tried + 1))
    return failed > 0 and math.fsum(ways) <= risk


GAUSSIAN = 1.4826  # standard deviation over median absolute deviation

WINDOW, LEAST = 32, 16  # losses to compare a new one with, and the fewest; a longer window is wide while losses fall


def robust_z(value: float, earlier: Iterable[float]) -> float:
    """The distance of `value` above the median of earlier values, in standard deviations.

    The deviation comes from the median distance to the median, so one earlier spike does not hide the next.

    Example:
        >>> round(robust_z(5.0, [1.0, 2.0, 3.0]), 2)
        2.02
    """
    window = [*earlier]
    median = statistics.median(window)
    spread = GAUSSIAN * statistics.median([abs(x - median) for x in window])
    # a spread below a thousandth of the loss is ignored: after a flat start any loss would be a spike
    return float((value - median) / max(spread, 1e-3 * abs(median), 1e-12))
