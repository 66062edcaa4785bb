"""A `Tally`: the sums, counts, extremes and histograms of a cast, for one cast or a table of casts.

Merging adds sums and counts, takes the larger or smaller extreme, and adds histograms bin by bin. The merged tally of
micro-batches, ranks or shards is therefore exactly the tally of the whole, except for fields with `of_cast`, which are
relative to what one cast saw (the amax, the largest column). A run stores only tallies; `statistics`
derives every statistic when it reads them, so formulas can be corrected later and runs can be merged.

`Tally` is the only list of sums. A new sum needs one field here and one line in each kernel: `measure` and
kernels/native/src/numbers.h. A kernel without the line is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

Detail = Literal["numbers", "exponents", "blocks", "anatomy"]
"""Histograms over elements: none; magnitudes; magnitudes, and distances below the amax of the element's block. The last
adds the parts of the error, see `measure.walk.anatomy`."""
DETAILS: tuple[Detail, ...] = ("numbers", "exponents", "blocks", "anatomy")
"""Each detail includes the details before it. The kernels know all but the last."""
Key = TypeVar("Key", bound=Hashable)
Number = Any
"""A float, or an array with one float64 per row of a table."""
Bins = npt.NDArray[np.float64]
"""(bins,), or (rows, bins)."""

EXPONENT_BINS = 1024
"""A quarter octave each: bits 30 to 21 of |x| in fp32. Bin 508 holds 1.0 up to 1.25, 512 holds 2.0 up to 2.5."""
RELATIVE_BINS = 164
"""A quarter octave each, downwards: bin 0 holds the amax of a block, bin 1 from 7/8 up to it, bin 5 from 7/16 on."""
ROW_SQNR_BINS, ROW_SQNR_DB = 128, 0.5
"""Bins of 0.5 dB from 0 dB up. The first and last bin also hold the rows beyond; exact rows are in the last."""
SPREAD_BINS = 32
"""Octaves of a block's amax below the tensor's amax."""
GRANULARITIES = ("row", "1x128", "1x32", "128x128")
"""Every recipe has a histogram for each of these blocks: how far elements lie below the amax. `what_if` reads them."""
PARTS = ("dead", "clipped", "scale", "grid")
"""The parts of an error, see `measure.walk.anatomy`."""


_SUM = MappingProxyType({"merge": "sum", "bins": 0, "detail": "numbers"})
_MAX = MappingProxyType({**_SUM, "merge": "max"})
_MIN = MappingProxyType({**_SUM, "merge": "min"})
_PART = MappingProxyType({**_SUM, "detail": "anatomy"})
_OF_CAST = MappingProxyType({"of_cast": True})


def _histogram(bins: int, detail: Detail = "numbers", *, of_cast: bool = False) -> Any:
    metadata = {"merge": "sum", "bins": bins, "detail": detail, "of_cast": of_cast}
    return field(default_factory=partial(np.zeros, bins), metadata=metadata)


@dataclass(frozen=True, eq=False)
class Tally:
    """Sufficient statistics of a tensor x and its cast q, with e = x - q; `+` merges two.

    A tally counts non-finite elements and excludes them from everything else. In a table every field is an array with
    one number per row; histograms are (rows, bins).

    Example:
        >>> both = Tally(n=3, amax=2.0) + Tally(n=1, amax=5.0)
        >>> both.n, both.amax
        (4.0, 5.0)
    """

    n: Number = field(default=0.0, metadata=_SUM)
    """Finite elements measured."""
    n_total: Number = field(default=0.0, metadata=_SUM)
    """Elements of the tensors, in the sample or not."""
    n_nonfinite: Number = field(default=0.0, metadata=_SUM)
    """Infinities and NaNs before the cast."""
    n_nonzero: Number = field(default=0.0, metadata=_SUM)
    """Finite elements that are not 0."""
    n_underflow: Number = field(default=0.0, metadata=_SUM)
    """Non-zero elements that the cast turned into 0."""
    n_subnormal: Number = field(default=0.0, metadata=_SUM)
    """Elements that became subnormal numbers of the format, which have fewer bits."""
    n_overflow: Number = field(default=0.0, metadata=_SUM)
    """Clipped elements: beyond the largest number of the format by more than its rounding range."""
    n_rows: Number = field(default=0.0, metadata=_SUM)
    """Rows that are not all zeros."""
    n_dead: Number = field(default=0.0, metadata={**_SUM, **_OF_CAST})
    """Channels with 2**-80 of the energy of the largest one or less: an activation that never fires."""
    n_casts: Number = field(default=0.0, metadata={**_SUM, **_OF_CAST})
    """Casts merged here: micro-batches x ranks."""
    n_scales: Number = field(default=0.0, metadata=_SUM)
    """Scales: one per block."""
    sx: Number = field(default=0.0, metadata=_SUM)
    """Sum of x."""
    sabs: Number = field(default=0.0, metadata=_SUM)
    """Sum of |x|."""
    sxx: Number = field(default=0.0, metadata=_SUM)
    """Sum of x**2."""
    sx4: Number = field(default=0.0, metadata=_SUM)
    """Sum of x**4."""
    see: Number = field(default=0.0, metadata=_SUM)
    """Sum of e**2."""
    sxe: Number = field(default=0.0, metadata=_SUM)
    """Sum of x * e."""
    srel: Number = field(default=0.0, metadata=_SUM)
    """Sum of |e| / |x| over non-zero x."""
    scale_log2: Number = field(default=0.0, metadata=_SUM)
    """Sum of log2(scale)."""
    scale_log2_squared: Number = field(default=0.0, metadata=_SUM)
    """Sum of log2(scale)**2."""
    n_predicted: Number = field(default=0.0, metadata=_SUM)
    """Casts with a predicted scale."""
    scale_error: Number = field(default=0.0, metadata=_SUM)
    """Sum of log2(scale used / current scale) over those casts, octaves."""
    amax: Number = field(default=0.0, metadata=_MAX)
    """Largest finite magnitude."""
    amin: Number = field(default=math.inf, metadata=_MIN)
    """Smallest magnitude that is not 0; inf if there is none."""
    max_error: Number = field(default=0.0, metadata=_MAX)
    """Largest |e|."""
    scale_max: Number = field(default=0.0, metadata=_MAX)
    """Largest scale; x * scale is what is rounded."""
    scale_min: Number = field(default=math.inf, metadata=_MIN)
    """Smallest scale."""
    scale_error_max: Number = field(default=-math.inf, metadata=_MAX)
    """Largest log2(scale used / current scale), octaves: above 0 the cast clips."""
    scale_error_min: Number = field(default=math.inf, metadata=_MIN)
    """Smallest log2(scale used / current scale), octaves: below 0 the cast loses low bits."""
    top_channel: Number = field(default=0.0, metadata={**_MAX, **_OF_CAST})
    """Largest share of the energy that one channel (a column) has in a cast."""
    row_sqnr: Bins = _histogram(ROW_SQNR_BINS)
    """Rows that are not all zeros, by the SQNR of the row."""
    channel_sqnr: Bins = _histogram(ROW_SQNR_BINS, of_cast=True)
    """Channels that are not dead, by the SQNR of the channel."""
    block_spread: Bins = _histogram(SPREAD_BINS, of_cast=True)
    """1x128 blocks that are not all zeros, by floor(log2(amax of the tensor / amax of the block))."""
    exponents: Bins = _histogram(EXPONENT_BINS, "exponents")
    """Non-zero elements by magnitude."""
    below_row: Bins = _histogram(RELATIVE_BINS, "blocks")
    """Non-zero elements by magnitude relative to the amax of their row. The other three do it for blocks."""
    energy_below_row: Bins = _histogram(RELATIVE_BINS, "blocks")
    """Sum of x**2 of these elements."""
    below_1x128: Bins = _histogram(RELATIVE_BINS, "blocks")
    energy_below_1x128: Bins = _histogram(RELATIVE_BINS, "blocks")
    below_1x32: Bins = _histogram(RELATIVE_BINS, "blocks")
    energy_below_1x32: Bins = _histogram(RELATIVE_BINS, "blocks")
    below_128x128: Bins = _histogram(RELATIVE_BINS, "blocks")
    energy_below_128x128: Bins = _histogram(RELATIVE_BINS, "blocks")
    error_dead: Number = field(default=0.0, metadata=_PART)
    """Sum of e**2 of non-zero elements that the cast turned into 0. This and the next four: see `walk.anatomy`."""
    error_clipped: Number = field(default=0.0, metadata=_PART)
    """Sum of e**2 of clipped elements."""
    error_live: Number = field(default=0.0, metadata=_PART)
    """Sum of e**2 of all others."""
    error_grid: Number = field(default=0.0, metadata=_PART)
    """What the last sum would be under the ideal scale of each block."""
    blocks_by_part: Bins = _histogram(len(PARTS), "anatomy")
    """Blocks with an error, by its largest part, in the order of PARTS."""

    def __add__(self, other: Tally) -> Tally:
        merge = {"sum": np.add, "max": np.maximum, "min": np.minimum}
        pairs = ((f, merge[f.metadata["merge"]](getattr(self, f.name), getattr(other, f.name))) for f in fields(self))
        return Tally(**{f.name: value if f.metadata["bins"] else plain(value) for f, value in pairs})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tally):
            return NotImplemented
        return all(np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    __hash__ = None  # type: ignore[assignment]  # holds arrays


def plain(value: Any) -> Any:
    """A 0-dimensional value as a float; anything else as it is."""
    return float(value) if np.ndim(value) == 0 else value


def tally_fields(kind: Literal["number", "histogram", "all"] = "all") -> Iterator[Field[Any]]:
    """The fields of a `Tally`. metadata["merge"] says how they merge; metadata["bins"] is 0 for a number."""
    for f in fields(Tally):
        if kind == "all" or bool(f.metadata["bins"]) == (kind == "histogram"):
            yield f


SUM_FIELDS = tuple(f for f in fields(Tally) if f.metadata["merge"] == "sum")
EXTREME_FIELDS = tuple(f for f in fields(Tally) if f.metadata["merge"] != "sum")
SUMMED: Mapping[Detail, Mapping[str, int]] = MappingProxyType(
    {
        detail: {f.name: f.metadata["bins"] for f in SUM_FIELDS if f.metadata["detail"] in DETAILS[: i + 1]}
        for i, detail in enumerate(DETAILS)
    }
)
"""Detail -> field -> bins (0 for a number)."""
EXTREMES: Mapping[str, int] = MappingProxyType(dict.fromkeys((f.name for f in EXTREME_FIELDS), 0))
DETAIL_WIDTHS: Mapping[Detail, int] = MappingProxyType(
    {detail: sum(bins or 1 for bins in asked.values()) for detail, asked in SUMMED.items()}
)
"""Detail -> filled length of a vector of sums; its fields are in the order of DETAILS."""


def row_of(rows: Tally, i: int) -> Tally:
    """One row of a table of tallies."""
    picked = {f.name: getattr(rows, f.name)[i] for f in fields(Tally)}
    numbers: dict[str, Any] = {name: value if np.ndim(value) else float(value) for name, value in picked.items()}
    return Tally(**numbers)


class Tallies(Mapping[Key, Tally]):
    """Key -> tally for all casts of one step, stored as one table, so that readers can work on whole columns.

    Example:
        >>> both = Tallies.of({"a": Tally(n=1), "b": Tally(n=3, amax=2.0)})
        >>> both["b"].amax, both.rows.n.tolist()
        (2.0, [1.0, 3.0])
    """

    def __init__(self, keys: Iterable[Key], rows: Tally) -> None:
        self._index = {key: i for i, key in enumerate(keys)}
        self.rows = rows
        """The table: every field is an array (tallies,), a histogram (tallies, bins)."""

    @classmethod
    def of(cls, tallies: Mapping[Key, Tally]) -> Tallies[Key]:
        """The table of any mapping."""
        if isinstance(tallies, Tallies):
            return tallies
        rows: dict[str, Any] = {}
        for f in fields(Tally):
            shape = (len(tallies), f.metadata["bins"]) if f.metadata["bins"] else (len(tallies),)
            values = [getattr(tally, f.name) for tally in tallies.values()]
            rows[f.name] = np.array(values, dtype=np.float64).reshape(shape)
        return cls(tallies, Tally(**rows))

    def __getitem__(self, key: Key) -> Tally:
        return row_of(self.rows, self._index[key])

    def __iter__(self) -> Iterator[Key]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


def unpack(sums: Bins, extremes: Bins) -> Tally:
    """A tally from the two vectors that `measure` fills.

    Args:
        sums: (..., width) in the order of SUM_FIELDS, histograms flat among them.
        extremes: (..., len(EXTREME_FIELDS)), minima negated, so that all of them merge by max.
    """
    values: dict[str, Any] = {}
    start = 0
    for f in SUM_FIELDS:
        bins = f.metadata["bins"]
        values[f.name] = sums[..., start : start + bins] if bins else plain(sums[..., start])
        start += bins or 1
    for i, f in enumerate(EXTREME_FIELDS):
        values[f.name] = plain(extremes[..., i] * (-1.0 if f.metadata["merge"] == "min" else 1.0))
    return Tally(**values)
