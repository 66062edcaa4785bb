"""Learns from outputs alone how an unknown kernel adds: the tree of its additions, how wide they are, how they round.

    terms    1 1 M 1 1 -M 1 1     M is so large that M + 1 = M
    result   the number of ones outside of the smallest sum that holds both M and -M

Ones that meet M before -M does are lost, those added later are not. So a probe with M at i and -M at j tells how many
terms the smallest sum around i and j has. Where more than two terms are added at once, as a tensor core does, none of
them meets another one earlier: their probes tell the same number. These counts determine the tree.

Method: FPRev (Xie et al., "Revealing Floating-Point Accumulation Orders in Software/Hardware Implementations", ATC
2025). Here the pivot of each step is drawn at random, so that a chain from either end takes about 2 n probes instead of
n * n / 2; a balanced tree takes n * log2(n). A second round of probes measures each kind of addition: 1 + 2**-p - 1
tells which bits survive. `confirm` adds random terms along the tree that was found, and compares bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import Tensor

from ottava.base.text import progress
from ottava.numerics.rounding import floor_log2, power_of_two

_LONGEST = 4096
_WIDEST = 60
_WIDTHS = MappingProxyType({23: "FP32", 52: "FP64", 10: "FP16", 7: "BF16"})


class OrderError(ValueError):
    """The outputs are not those of a tree of additions that probes can see; the message says why."""

    exit_code = 1


@dataclass(frozen=True)
class Probed:
    """A sum of n terms, as a function that probes can call."""

    run: Callable[[Tensor], Tensor]
    """(cases, n) float64 -> (cases,): one sum for each row. Terms have at most 3 bits."""
    n: int
    """Terms."""
    big: float
    """Power of two, the largest term."""
    unit: float
    """Power of two, the smallest term."""

    def __post_init__(self) -> None:
        if not 2 <= self.n <= _LONGEST:
            raise ValueError(f"order: got a sum of {self.n} terms; needs 2 to {_LONGEST}")


def of_sum(function: Callable[[Tensor], Tensor], n: int, dtype: torch.dtype = torch.float32) -> Probed:
    """Prepares a function (n,) -> one number, such as torch.sum, for `reveal`.

    Example:
        >>> reveal(of_sum(torch.sum, 4)).n
        4
    """
    high, low = _range(dtype, product=False)
    return Probed(lambda x: torch.stack([function(row.to(dtype)).double().reshape(()) for row in x]), n, high, low)


def of_gemm(
    function: Callable[[Tensor, Tensor], Tensor],
    k: int,
    dtype: torch.dtype = torch.float32,
    *,
    shape: tuple[int, int] = (1, 1),
    at: tuple[int, int] = (0, 0),
) -> Probed:
    """Prepares one element of a GEMM for `reveal`; kernels may add otherwise for another shape or element.

    Args:
        function: (a (M, K), b (N, K)) -> (M, N).
        dtype: of a and b: FP32, BF16, FP16, E4M3 or E5M2. The output should be FP32; one of 16 bits can count less.
        shape: M and N.
        at: row and column of the element.

    Example:
        >>> reveal(of_gemm(lambda a, b: (a * b).sum(1, keepdim=True), 4)).n
        4
    """
    (m, n), (row, column) = shape, at
    if not (0 <= row < m and 0 <= column < n):
        raise ValueError(f"order: got element {at} of a result {shape}; needs one that is inside")
    high, low = _range(dtype, product=True)
    wide = high >= 2.0**60  # range to spare: one operand is all ones

    def run(terms: Tensor) -> Tensor:
        # a term is a product: its exponent is shared out, so that FP8 reaches the square of its range
        half = torch.div(floor_log2(terms), 2, rounding_mode="floor") * (terms != 0) * (not wide)
        right = power_of_two(half).to(dtype)
        left = (terms / right.double()).to(dtype)
        pairs = zip(left, right, strict=True)
        results = (function(x.expand(m, k).contiguous(), y.expand(n, k).contiguous()) for x, y in pairs)
        return torch.stack([result[row, column].double() for result in results])

    # 44 octaves are enough, and leave room in an output of FP16
    return Probed(run, k, *((high, low) if wide else (high * high, max(low * low, high * high * 2.0**-44))))


def _range(dtype: torch.dtype, product: bool) -> tuple[float, float]:
    try:
        info = torch.finfo(dtype)
    except TypeError:
        raise ValueError(f"order: got {dtype}; needs a floating-point dtype") from None
    if info.max > 2.0**100:
        return 2.0**100, 1.0
    high = 2.0 ** math.floor(math.log2(info.max))
    # E4M3 has too few numbers without the subnormal ones, which kernels of FP16 may flush to zero
    few = math.log2(high / info.tiny) * (2 if product else 1) < 50
    return high, info.tiny * info.eps if few else info.tiny


@dataclass(frozen=True)
class Addition:
    """How one kind of addition rounds: that of two terms, or that of many at once."""

    kept: int | None
    """Bits after the leading one that its result keeps; None: no third term is added later, so nothing tells."""
    aligned: int | None = None
    """Of many at once: bits below the largest exponent to which a term is cut before it is added."""
    mode: str = ""
    """"to nearest", "toward zero", "up", "down" or "away from zero"; "" if nothing tells."""


@dataclass(frozen=True)
class Order:
    """A tree of additions, and what is known of them."""

    n: int
    """Terms: the numbers 0 to n - 1."""
    additions: tuple[tuple[int, ...], ...]
    """What each addition takes: terms, and from n on the results of additions; the last one is the root."""
    pair: Addition | None = None
    """Additions of two; None: there are none."""
    fused: Addition | None = None
    """Additions of more than two at once; None: there are none."""
    probes: int = 0
    """Sums that were computed to find this."""

    @property
    def clusters(self) -> frozenset[frozenset[int]]:
        """The terms below each addition: equal for equal trees, however they are written down."""
        return frozenset(map(frozenset, self.leaves[self.n :]))

    @cached_property
    def leaves(self) -> list[list[int]]:
        """The terms below each node, sorted."""
        leaves = [[i] for i in range(self.n)]
        for parts in self.additions:
            leaves.append(sorted(leaf for part in parts for leaf in leaves[part]))
        return leaves

    @property
    def name(self) -> str:
        """Short, such as "groups of 32 fused, one after another"."""
        words = [_named(self)]
        if self.fused is not None and self.fused.aligned is not None:
            kept = "" if self.fused.kept in (None, self.fused.aligned) else f", sums keep {self.fused.kept}"
            words.append(f"terms cut to {self.fused.aligned} bits below the largest{kept}")
        if self.pair is not None and self.pair.kept is not None:
            bits = _WIDTHS.get(self.pair.kept, f"{self.pair.kept} bits")
            words.append(f"{'sums of two in ' if self.fused else ''}{bits} {self.pair.mode}".rstrip())
        return "; ".join(words)

    def __str__(self) -> str:
        text: dict[int, str] = {}
        for number, parts in enumerate(self.additions, self.n):
            text[number] = f"({' '.join(text.pop(part) if part >= self.n else str(part) for part in parts)})"
        return next(iter(text.values()))

    def to_json(self) -> str:
        """The name, the additions, and what is known of them, as JSON."""
        known = {kind: vars(found) for kind in ("pair", "fused") if (found := getattr(self, kind)) is not None}
        return json.dumps({"name": self.name, "n": self.n, "additions": self.additions, **known, "probes": self.probes})

    def sum(self, terms: Tensor) -> Tensor:
        """(cases, n) float64 -> (cases,): the terms added along this tree, each sum rounded as was found.

        Raises:
            OrderError: how an addition rounds is not known, or is not to nearest (two) or toward zero (many).
        """
        values = list(terms.unbind(1))
        for parts in self.additions:
            taken, how = torch.stack([values[part] for part in parts]), self.pair if len(parts) == 2 else self.fused
            if how is None or how.kept is None or how.mode not in ("to nearest", "toward zero"):
                raise OrderError("order: a sum along this tree needs to know how it rounds; probe more terms")
            if how.aligned is not None:
                unit = power_of_two(torch.where(taken != 0, floor_log2(taken), -1000).amax(0) - how.aligned)
                taken = (taken / unit).trunc() * unit
            total = taken.sum(0)  # exact in float64 for the terms of `confirm`
            unit = power_of_two(floor_log2(total) - how.kept)
            values.append(((total / unit).round() if how.mode == "to nearest" else (total / unit).trunc()) * unit)
        return values[-1]


def reveal(probed: Probed, *, seed: int = 0) -> Order:
    """The tree of additions of a sum, from its outputs.

    Cost: about 2 n sums for a chain, n * log2(n) for a balanced tree, n * g / 2 for groups of g.
    Edge cases: what probes cannot see: the order inside an addition of many; bits that an output of 16 bits drops (it
        counts to 256 in BF16 and 2,048 in FP16); E4M3 products span 34 octaves, so FP32 sums of them up to n = 512;
        sums of two that are rounded in one direction are mostly refused. A compensated sum shows its plain order: only
        `confirm` tells that there is more to it.
    Raises:
        OrderError: the outputs fit no tree, or are no counts.

    Example:
        >>> order = reveal(of_sum(lambda x: (x[0] + x[1]) + (x[2] + x[3]), 4))
        >>> str(order), order.name
        ('((0 1) (2 3))', 'pairwise; FP32 to nearest')
    """
    search = _Search(probed, seed)
    search.check()
    search.build(list(range(probed.n)))
    order = _canonical(probed.n, search.additions)
    fused, pair = (_measure(search, order, many=many) for many in (True, False))
    if pair is not None and fused is not None and pair.kept == fused.aligned:
        pair = Addition(None)  # what cuts their sums may be the addition of many behind them
    return replace(order, pair=pair, fused=fused, probes=search.probes)


def confirm(probed: Probed, order: Order, *, trials: int = 64, out_dtype: torch.dtype = torch.float32) -> float:
    """Share of random sums whose bits are those of terms added along the tree: 1.0 says that nothing was missed.

    Args:
        out_dtype: to which the kernel rounds its result.
    Raises:
        OrderError: how an addition rounds is not known.

    Example:
        >>> probed = of_sum(lambda x: (x[0] + x[1]) + (x[2] + x[3]), 4)
        >>> confirm(probed, reveal(probed))
        1.0
    """
    draw = torch.Generator().manual_seed(1)
    shape = (trials, order.n)
    exponents = torch.randint(-12, 13, shape, generator=draw)  # what E4M3 has, and more bits than FP32 keeps
    mantissa = torch.randint(4, 8, shape, generator=draw).double() / 4
    terms = mantissa * power_of_two(exponents) * (torch.randint(0, 2, shape, generator=draw) * 2 - 1)
    expected = order.sum(terms).to(out_dtype).double()
    return float((probed.run(terms) == expected).double().mean())


class _Search:
    """Probes a sum, and notes additions as they are found, in any order."""

    def __init__(self, probed: Probed, seed: int) -> None:
        self.probed, self.n, self.probes = probed, probed.n, 0
        self.additions: dict[int, tuple[int, ...]] = {}
        self._draw = torch.Generator().manual_seed(seed)
        self._next = probed.n
        self._ahead = progress(range(probed.n), "asking for the order of sums")

    def run(self, terms: Tensor) -> Tensor:
        self.probes += len(terms)
        return self.probed.run(terms)

    def check(self) -> None:
        """An odd number beyond the output's bits is not representable: n or n - 1 is one."""
        terms = torch.full((2, self.n), self.probed.unit, dtype=torch.float64)
        terms[1, 0] = 0.0
        counts = (self.run(terms) / self.probed.unit).tolist()
        if counts != [self.n, self.n - 1]:
            raise OrderError(
                f"order: {self.n} and {self.n - 1} terms of 1 unit sum up to {counts[0]:g} and {counts[1]:g} units; "
                "needs exact counts: take fewer terms, a wider output or another dtype"
            )

    def sizes(self, i: int, others: Sequence[int]) -> list[int]:
        """The number of terms in the smallest sum that holds i and each of the others."""
        terms, possible = torch.full((len(others), self.n), self.probed.unit, dtype=torch.float64), range(self.n - 1)
        terms[:, i] = self.probed.big
        terms[torch.arange(len(others)), torch.tensor(others)] = -self.probed.big
        counts = (self.run(terms) / self.probed.unit).tolist()
        for at, j in enumerate(others):
            if counts[at] not in possible:
                # sums rounded toward zero lose ones beside M, not beside -M: the other way round they may be lost, too
                swapped = torch.where(terms[at].abs() == self.probed.big, -terms[at], terms[at])
                counts[at] = float(self.run(swapped[None]) / self.probed.unit)
            if counts[at] not in possible:
                raise OrderError(
                    f"order: with {self.probed.big:g} at {i} and its negative at {j} the sum is {counts[at]:g} units; "
                    f"needs a count of 0 to {self.n - 2}: the kernel compensates, or does not round to nearest"
                )
        found = [self.n - int(count) for count in counts]
        if self.n > 2 and set(found) == {2} and len(found) == self.n - 1:
            raise OrderError("order: no term is ever lost; the sum is exact, or wider than the probes")
        return found

    def build(self, terms: list[int]) -> tuple[int, int]:
        """Notes the additions among terms; (their sum, the number of terms in the smallest sum that holds them)."""
        next(self._ahead, None)  # each term is once alone, or the one that is asked about
        if len(terms) == 1:
            return terms[0], 1
        # at random: a fixed pivot would meet its own worst case, n * n / 2
        i = terms.pop(int(torch.randint(len(terms), (), generator=self._draw)))
        sizes = self.sizes(i, terms)
        node, count, last = i, 1, 1
        for size in sorted(set(sizes)):
            group = [j for j, found in zip(terms, sizes, strict=True) if found == size]
            length = len(group)
            if last != count:
                raise self._no_tree(count, last)
            other, within = self.build(group)
            if within not in (length, size):
                raise self._no_tree(length, within)
            # several that meet for the first time in this very addition are all its own
            parts = self.additions.pop(other) if within == size and length > 1 else (other,)
            self.additions[self._next] = node, *parts
            node, count, last, self._next = self._next, count + length, size, self._next + 1
        return node, last

    def _no_tree(self, count: int, size: int) -> OrderError:
        return OrderError(
            f"order: {count} terms say that the smallest sum around them has {size}; needs outputs of one tree of "
            "additions: the kernel's order depends on the numbers, or a sum is not rounded alike each time"
        )


def _canonical(n: int, additions: dict[int, tuple[int, ...]]) -> Order:
    """Small sums first, and of equal ones that with the first term; parts in the order of their first terms."""
    leaves: dict[int, tuple[int, int]] = {i: (1, i) for i in range(n)}
    # a node is joined after its parts
    for node, parts in sorted(additions.items()):
        leaves[node] = sum(leaves[part][0] for part in parts), min(leaves[part][1] for part in parts)
    nodes = sorted(additions, key=leaves.__getitem__)
    number = {i: i for i in range(n)} | {node: place for place, node in enumerate(nodes, n)}
    return Order(n, tuple(tuple(number[p] for p in sorted(additions[x], key=lambda p: leaves[p][1])) for x in nodes))


def _measure(search: _Search, order: Order, *, many: bool) -> Addition | None:
    """How additions of two, or of more at once, round: of one whose result is added to a term right away."""
    kinds = [x for x, parts in enumerate(order.additions, order.n) if (len(parts) > 2) == many]
    if not kinds:
        return None
    leaves, base = order.leaves, search.probed.big
    widest = min(_WIDEST, int(math.log2(base / search.probed.unit)))
    above = {part: x for x, parts in enumerate(order.additions, order.n) for part in parts}

    def parts(node: int) -> tuple[int, ...]:
        return order.additions[node - order.n]

    # an addition of two behind it cuts nothing off; none at all shows nothing
    node = min(kinds, key=lambda x: (x not in above, x in above and len(parts(above[x])) > 2))
    first, second, *others = (leaves[part][0] for part in parts(node))

    def results(third: int, rows: list[list[float]]) -> list[float]:
        terms = torch.zeros(len(rows), search.n, dtype=torch.float64)
        terms[:, [first, second, third]] = base * torch.tensor(rows, dtype=torch.float64)
        return (search.run(terms) / base).tolist()

    def last_kept(third: int) -> int | None:
        """The largest p with 1 + 2**-p - 1 > 0."""
        seen = results(third, [[1.0, 2.0**-p, -1.0] for p in range(1, widest + 1)])
        return max((p for p, value in enumerate(seen, 1) if value != 0), default=0) if seen else None

    aligned = last_kept(others[0]) if many else None
    if node not in above:
        return Addition(None, aligned)
    beside = next(leaves[part][0] for part in parts(above[node]) if part != node)
    kept = last_kept(beside)
    if not kept or kept + 2 > widest:
        return Addition(kept, aligned)
    rows = [[sign, sign * share * 2.0**-kept, -sign] for sign in (1.0, -1.0) for share in (0.25, 0.75)]
    up = "".join("+" if value else "." for value in results(beside, rows))
    modes = {".+.+": "to nearest", "....": "toward zero", "++++": "away from zero", "++..": "up", "..++": "down"}
    return Addition(kept, aligned, modes.get(up, ""))


def _named(order: Order) -> str:
    """A chain, a balanced tree, or either of parts that are chains."""
    n, leaves = order.n, order.leaves
    sums = dict(enumerate(order.additions, n))
    chains: set[int] = set()
    for node, parts in sums.items():
        inner = [part for part in parts if part >= n]
        chains |= {node} if len(inner) < 2 and chains.issuperset(inner) else set()
    top = n + len(sums) - 1
    if top in chains:
        return _chain(order)
    balanced = all(len({len(leaves[part]) for part in parts}) == 1 and len(parts) == 2 for parts in sums.values())
    if balanced:
        return "pairwise"
    above = [parts for node, parts in sums.items() if node not in chains]
    held = [part for taken in above for part in taken if part < n or part in chains]
    # the last block of a chain may be shorter
    sizes = sorted({len(leaves[part]) for part in held})
    steps = {b - a for part in held for a, b in pairwise(leaves[part])}
    kind = "blocks" if steps <= {1} else "lanes" if len(steps) == 1 else "parts"
    one_by_one = all(sum(part >= n and part not in chains for part in taken) < 2 for taken in above)
    halved = all(len({len(leaves[part]) for part in taken}) == 1 for taken in above)
    how = "pairwise" if halved else "one after another" if one_by_one else "a tree of them"
    size = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"{sizes[0]} (sequential)"
    return f"{len(held)} {kind} of {size}, {how}"


def _chain(order: Order) -> str:
    first, *rest = order.additions
    added = [len(parts) - 1 for parts in rest]
    if not rest or {*added} == {1}:
        terms = [*first, *(min(parts) for parts in rest)]
        return (
            _sequential(terms) if len(first) == 2 else f"{len(first)} fused" + ", then one after another" * bool(rest)
        )
    if {*added[:-1], added[0]} == {added[0]} and added[-1] <= added[0]:
        after = "" if len(first) == added[0] else f" after {len(first)}"
        return f"groups of {added[0]} fused{after}, one after another"
    return f"a chain of {len(order.additions)} additions of {min(added) + 1} to {max(added) + 1}"


def _sequential(terms: list[int]) -> str:
    """The first two terms of a chain are interchangeable."""
    for run in (1, 2, 4, 8, len(terms)):
        chunks = [sorted(terms)[at : at + run] for at in range(0, len(terms), run)]
        if [term for chunk in chunks for term in reversed(chunk)][2:] == terms[2:]:
            many = "" if run == 1 else " from the last" if run == len(terms) else f", each {run} from the last"
            return f"sequential{many}"
    return "a chain, not in order"
