"""Ways of being wrong. Each turns the reference into that of a faulty kernel.

An entry is a name, a sentence, the kinds that it is for, and a function of the call: it returns the knobs of
`judge.expect`, and `inputs` among them where the fault changes what is read; None where the fault has no meaning there.
Earlier entries win a draw, so narrow ones come first.
"""

# ruff: noqa: E501  (an entry is a line)
# mypy: disable-error-code="misc"
# (a lambda with a default has no type that mypy infers)
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import permutations
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ottava.numerics.accumulator import ACCUMULATORS
from ottava.numerics.formats import Format, get_format
from ottava.numerics.scaling import BLOCK_1X16, BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, PER_ROW, PER_TENSOR, Granularity
from ottava.numerics.tensor import QuantizationSpec
from ottava.prove.codes import (
    EIGHT,
    by_memory,
    bytewise,
    ends_of,
    fp4_as,
    grown_largest,
    in_bad_tile,
    in_order,
    numbers_of,
    on_grid,
    run_on,
    significant,
    tiled,
    without_subnormals,
    without_tail,
    written_codes,
)  # fmt: skip
from ottava.prove.judge import block_amax, cast_spec, scale_inv_of, spread
from ottava.recipe import CELLS, GEMMS, RECIPES, get_recipe


class Asked(NamedTuple):
    """What a hypothesis may look at."""

    kind: str
    inputs: Mapping[str, Any]
    what: Mapping[str, Any]
    before: Mapping[str, Any] | None
    """The inputs of the call before, of these shapes if there was one; None: there was none."""
    first: Mapping[str, Any] | None = None
    """Those of the first call of these shapes."""
    latest: Mapping[str, Any] | None = None
    """Those of the call before, whatever its shapes."""
    largest: float = 0.0
    """The largest finite amax of x in all calls before."""

    @property
    def spec(self) -> QuantizationSpec:
        """Of a cast."""
        spec = cast_spec(self.what)
        assert spec is not None
        return spec

    @property
    def format(self) -> Format:
        """Of the codes that are written."""
        return self.spec.format if self.kind == "cast" else get_format(self.what.get("format", "e4m3"))

    def cell(self, place: str) -> QuantizationSpec | None:
        """A cast of a layer's recipe, such as fprop.lhs."""
        gemm, side = place.split(".")
        found: QuantizationSpec | None = getattr(getattr(get_recipe(self.what.get("recipe", "tensorwise")), gemm), side)
        return found

    def amax(self, x: Tensor | None = None) -> Tensor:
        """Of each block of the recipe."""
        return block_amax(self.inputs["x"] if x is None else x, self.spec.granularity)


Knobs = Callable[[Asked], dict[str, Any] | None]
Change = Callable[[Tensor], Tensor | None]


class Fault(NamedTuple):
    """A way of being wrong."""

    name: str
    sentence: str
    kinds: tuple[str, ...]
    knobs: Knobs
    loose: bool = False
    """Whether it allows more than one number, so that it explains too easily."""


_CODES, _SUMS = ("encode", "cast"), ("gemm", "grouped")
_HALVES = (("BF16", torch.bfloat16), ("FP16", torch.float16))


def rows(kinds: tuple[str, ...], *entries: tuple[str, str, Knobs]) -> Iterator[Fault]:
    """Entries of the same kinds: (name, sentence, knobs)."""
    yield from (Fault(name, sentence, kinds, knobs) for name, sentence, knobs in entries)


# --- knobs -----------------------------------------------------------------------------------------------------------


def always(**knobs: Any) -> Knobs:
    """The same knobs for every call."""
    return lambda call: dict(knobs)


def changed(**changes: Callable[[Any], Any]) -> Knobs:
    """Inputs that the kernel reads differently; a change that gives None, or another shape, has no meaning here."""

    def knobs(call: Asked) -> dict[str, Any] | None:
        inputs = dict(call.inputs)
        for name, change in changes.items():
            if name not in inputs or not isinstance(inputs[name], Tensor):
                return None
            new = change(inputs[name])
            if new is None or new.shape != inputs[name].shape:
                return None
            inputs[name] = new
        return {"inputs": inputs}

    return knobs


def _told(**changes: Callable[[Mapping[str, Any]], Any]) -> Knobs:
    """Facts that the kernel takes to be others than it was told."""
    return lambda call: {"what": {**call.what, **{name: change(call.what) for name, change in changes.items()}}}


def _earlier(*keys: str) -> Knobs:
    """Inputs of the call before."""

    def knobs(call: Asked) -> dict[str, Any] | None:
        before = call.before
        if before is None or any(k not in call.inputs or before[k].shape != call.inputs[k].shape for k in keys):
            return None
        return {"inputs": {**call.inputs, **{key: before[key] for key in keys}}}

    return knobs


def _stale(kinds: tuple[str, ...], *entries: tuple[str, str, Knobs]) -> Iterator[Fault]:
    """Entries that ask for the call before, for the first call of these shapes, and for the last call of any shape."""
    yield from rows(kinds, *((name, f"{said} the call before", knobs) for name, said, knobs in entries))
    for name, said, knobs in entries:
        text = f"{said} the first call of these shapes"
        yield Fault(name, text, kinds, lambda c, knobs=knobs: knobs(c._replace(before=c.first)))
        text = f"{said} the last call of any shape"
        yield Fault(name, text, kinds, lambda c, knobs=knobs: knobs(c._replace(before=c.latest)))


def _reads(change: Change) -> Knobs:
    return lambda call: None if (new := change(call.inputs["x"])) is None else {"x": new}


def _of_amax(change: Change) -> Knobs:
    return lambda call: None if (new := change(call.amax())) is None else {"amax": new}


def _bits(change: Callable[[Tensor, int], Tensor]) -> Knobs:
    """Codes with other bits; change: of (bytes, the sign bit)."""
    return lambda c: changed(
        codes=lambda codes: change(codes.view(torch.uint8), 1 << (c.format.bits - 1)).view(codes.dtype)
    )(c)


def _short(x: float, bits: int) -> float:
    return float(significant(torch.tensor(x, dtype=torch.float64), bits))


def _as_codes(call: Asked, other: Format) -> dict[str, Any] | None:
    """An encoder of another format, whose codes are read in the right one."""
    return None if other == call.format else {"values": numbers_of(written_codes(call.inputs["x"], other), call.format)}


def _of_bits(call: Asked, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Right codes with other bits."""
    codes = change(written_codes(call.inputs["x"], call.format).int())
    return {"values": numbers_of(codes.to(torch.uint8), call.format)}


def _cast_as(call: Asked, other: Format, top: float | None) -> dict[str, Any] | None:
    spec, x = call.spec, call.inputs["x"]
    if other == spec.format or not x.numel():
        return None
    mine = replace(spec, format=other) if spec.scale_format != "e4m3" else spec
    z = x.double() / spread(scale_inv_of(call.amax(), mine, top or spec.format.max), spec, x.shape)
    return {"values": numbers_of(written_codes(z, other), spec.format), "scale_top": top}


def _equal_blocks(call: Asked) -> dict[str, Any] | None:
    own, x = call.spec.granularity, call.inputs["x"]
    if not x.numel():
        return None
    cut = Granularity(*(-(-n // g) for n, g in zip(x.shape, own.grid_shape(x.shape), strict=True)))
    return None if cut.grid_shape(x.shape) != own.grid_shape(x.shape) else {"amax": block_amax(x, cut)}


def _exchanged(call: Asked) -> dict[str, Any] | None:
    """Each side has the scales of the other; where these are fewer rows, from the first again."""
    a, b = call.inputs["scale_inv_a"], call.inputs["scale_inv_b"]
    if a.shape[1:] != b.shape[1:] or not (a.numel() and b.numel()):
        return None
    if a.dim():
        a, b = (y[torch.arange(len(x)) % len(y)] for x, y in ((a, b), (b, a)))
    else:
        a, b = b, a
    return {"inputs": {**call.inputs, "scale_inv_a": a, "scale_inv_b": b}}


def _carried(call: Asked) -> dict[str, Any]:
    """Codes that round up past the largest one, into the sign bit or NaN."""
    x, fmt = call.inputs["x"].double(), call.format
    codes, last = written_codes(call.inputs["x"], fmt).int(), written_codes(torch.tensor([fmt.max]), fmt)
    top, below = float(numbers_of(last, fmt)), float(numbers_of(last - 1, fmt))
    over = x.abs() >= top + (top - below) / 2
    return {"values": numbers_of((torch.where(over, codes + 1, codes) & ((1 << fmt.bits) - 1)).to(torch.uint8), fmt)}


def _over_ends(call: Asked) -> dict[str, Any] | None:
    """Blocks of x as one list, which run on from row to row."""
    x, (height, width) = call.inputs["x"].double(), call.spec.granularity.block_shape(call.inputs["x"].shape)
    if height != 1 or not x.numel() or x.shape[1] % width == 0:
        return None
    flat = torch.nn.functional.pad(x.abs().reshape(-1), (0, -x.numel() % width)).view(-1, width).amax(1)
    each = flat.repeat_interleave(width)[: x.numel()].view(x.shape)
    return {"amax": each[:, ::width], "values": on_grid(x / scale_inv_of(each, call.spec), call.spec.format)}


def _other_blocks(call: Asked, blocks: Granularity, exponent: str | None = None) -> dict[str, Any] | None:
    """amaxes of other blocks, as far as one of them serves a whole block of the recipe."""
    own, x = call.spec.granularity, call.inputs["x"]
    if blocks == own or not x.numel():
        return None
    each = blocks.expand(block_amax(x, blocks), x.shape).expand(x.shape)
    height, width = own.block_shape(x.shape)
    return {"amax": each[::height, ::width], "exponent": exponent}


def _stale_cells(call: Asked, side: str, places: tuple[str, ...]) -> dict[str, Any] | None:
    if call.before is None:
        return None
    cells, x = {}, call.before[side].reshape(-1, call.before[side].shape[-1])
    for place in places:
        turned = place.startswith("dgrad" if side == "weight" else "wgrad")
        if (spec := call.cell(place)) is not None:
            cells[place] = {"amax": block_amax(x.t() if turned else x, spec.granularity)}
    return {"cells": cells}


def _theirs(call: Asked, places: tuple[str, ...], side: str) -> dict[str, Any] | None:
    """One scale for a tensor, which is that of another tensor."""
    other = call.inputs["grad" if side == "gradient" else side]
    if any((spec := call.cell(place)) is None or spec.granularity != PER_TENSOR for place in places):
        return None
    amax = block_amax(other.reshape(-1, other.shape[-1]), PER_TENSOR)
    return {"cells": {place: {"amax": amax} for place in places}}


def _of_sequence(call: Asked, first: bool) -> dict[str, Any] | None:
    x, spec = call.inputs["x"], call.cell("fprop.lhs")
    if x.dim() < 3 or spec is None or spec.granularity != PER_ROW:
        return None
    each = x.double().abs().amax(-1)
    each = each[..., :1] if first else each.amax(-1, keepdim=True)
    return {"cells": {"fprop.lhs": {"amax": each.expand(x.shape[:-1]).reshape(-1, 1)}}}


def _rows_kept(call: Asked, count: Callable[[tuple[int, ...]], int], last: bool = False) -> dict[str, Any] | None:
    """x and the gradient of the first rows, or of the last ones; count: of their shape."""
    x, grad = call.inputs["x"], call.inputs["grad"]
    rows, dy = x.reshape(-1, x.shape[-1]).clone(), grad.reshape(-1, grad.shape[-1]).clone()
    kept = count(tuple(x.shape))
    if kept >= len(rows):
        return None
    gone = slice(len(rows) - kept) if last else slice(kept, None)
    rows[gone], dy[gone] = 0, 0
    return {"inputs": {**call.inputs, "x": rows.view(x.shape), "grad": dy.view(grad.shape)}}


# --- scales ----------------------------------------------------------------------------------------------------------


def _scales(change: Callable[[Tensor], Tensor], of_bytes: Callable[[Tensor], Tensor] | None = None) -> Change:
    """A change of scales, and of their E8M0 bytes in int32; None: bytes have no such fault."""

    def both(scale: Tensor) -> Tensor | None:
        if scale.dtype != torch.uint8:
            return change(scale)
        return None if of_bytes is None else of_bytes(scale.to(torch.int32)).clamp(0, 254).to(torch.uint8)

    return both


def _shift(by: int, dim: int) -> Change:
    return lambda scale: scale.roll(by, dim) if scale.dim() >= -dim and scale.shape[dim] > 1 else None


def _inverse(scale: Tensor) -> Tensor | None:
    return _scales(torch.reciprocal, lambda s: 254 - s)(scale)


# fmt: off


def scale_faults() -> tuple[tuple[str, str, Change], ...]:
    """What may happen to scales: name, sentence, change."""
    return (
        ("scale transposed", "Scales are read in the order of the transpose", lambda s: s.mT.contiguous().reshape(s.shape) if s.dim() > 1 else s),
        ("scale shifted by one block", "A block gets the scale of the block before it, along K", _shift(1, -1)),
        ("scale shifted by one block", "A block gets the scale of the block behind it, along K", _shift(-1, -1)),
        ("scale shifted by one block", "A block gets the scale of the block behind it, and the last its own", lambda s: torch.cat([s[..., 1:], s[..., -1:]], -1) if s.dim() and s.shape[-1] > 1 else None),
        ("scale shifted by one row", "A row gets the scale of the row before it", _shift(1, -2)),
        ("scale shifted by one row", "A row gets the scale of the row behind it", _shift(-1, -2)),
        ("scale ignored", "The scale is taken for 1", _scales(torch.ones_like, lambda s: torch.full_like(s, 127))),
        ("scale squared", "The scale is applied twice", _scales(lambda s: s * s, lambda s: 2 * s - 127)),
        ("first scale for all", "The first scale is used for all blocks", lambda s: s.flatten()[:1].expand(s.numel()).reshape(s.shape) if s.numel() else s),
        ("largest scale for all", "The largest scale is used for all blocks", lambda s: s.amax().expand(s.shape) if s.numel() else s),
        ("scale doubled", "The scale is twice as large (an exponent bias of 126)", _scales(lambda s: s * 2.0, lambda s: s + 1)),
        ("scale halved", "The scale is half as large (an exponent bias of 128)", _scales(lambda s: s * 0.5, lambda s: s - 1)),
        ("first scale of each row", "Each row uses its first scale for all of K", lambda s: s[..., :1].expand(s.shape) if s.dim() > 1 else None),
        ("last scale repeated", "The last block along K gets the scale of the block before it", lambda s: torch.cat([s[..., :-1], s[..., -2:-1]], -1) if s.dim() > 1 and s.shape[-1] > 1 else None),
        ("last scale repeated", "The last row of scales is that of the row before it", lambda s: torch.cat([s[:-1], s[-2:-1]], 0) if s.dim() > 1 and len(s) > 1 else None),
        ("last scale ignored", "The last scale along K is taken for 1", lambda s: torch.cat([s[..., :-1], torch.full_like(s[..., -1:], 127 if s.dtype == torch.uint8 else 1)], -1) if s.dim() > 1 else None),
        ("last scale of each row", "Each row uses its last scale for all of K", lambda s: s[..., -1:].expand(s.shape) if s.dim() > 1 and s.shape[-1] > 1 else None),
        ("scales in tiles", "Scales lie in tiles of 128 x 4, not row by row", lambda s: tiled(s, False)),
        ("scales out of tiles", "Scales are read as if they lay in tiles of 128 x 4", lambda s: tiled(s, True)),
        *((f"scale of {n} blocks", f"Each {n} blocks along K use the first of their scales", lambda s, n=n: s[..., torch.arange(s.shape[-1]) // n * n] if s.dim() > 1 and s.shape[-1] > 1 else None) for n in (2, 4)),
        *((f"scale of {n} rows", f"Each {n} rows use the first of their scales", lambda s, n=n: s[..., torch.arange(s.shape[-2]) // n * n, :] if s.dim() > 1 and s.shape[-2] > 1 else None) for n in (2, 4, 8, 16, 32, 128)),
        ("second of four scales", "Of each four scales along K the second is replaced by the first", lambda s: s[..., torch.where(torch.arange(s.shape[-1]) % 4 == 1, torch.arange(s.shape[-1]) - 1, torch.arange(s.shape[-1]))] if s.dim() > 1 and s.shape[-1] > 1 else None),
        ("first scale of each column", "The scales of the first row are used for all rows", lambda s: s[..., :1, :].expand(s.shape) if s.dim() > 1 else None),
        ("NaN of scales lost", "The scale byte 255, NaN, is read as 254", _scales(torch.clone, lambda s: s)),
        ("scale in BF16", "The scale is rounded to BF16", _scales(lambda s: s.to(torch.bfloat16).to(s.dtype))),
        ("scale in FP16", "The scale is rounded to FP16", _scales(lambda s: s.to(torch.float16).to(s.dtype))),
        ("scale a power of two", "The scale is rounded down to a power of two", _scales(lambda s: torch.exp2(s.log2().floor()))),
        ("scale a power of two", "The scale is rounded up to a power of two", _scales(lambda s: torch.exp2(s.log2().ceil()))),
    )


def along_k() -> tuple[tuple[str, str, Callable[[int], list[int]]], ...]:
    """Orders along K: name, sentence, and which number of K stands at each place."""
    return (
        ("neighbours swapped", "Each two neighbours along K are swapped, as nibbles of a byte", lambda n: [min(k ^ 1, n - 1) for k in range(n)]),
        ("neighbours swapped", "Each two neighbours along K are swapped, as nibbles of a byte, the last of an odd number with zero", lambda n: [k ^ 1 for k in range(n)]),
        ("one nibble for two", "Each two neighbours along K are the first of them", lambda n: [k & ~1 for k in range(n)]),
        ("one nibble for two", "Each two neighbours along K are the second of them", lambda n: [min(k | 1, n - 1) for k in range(n)]),
        ("halves of K interleaved", "Numbers of both halves of K take turns", lambda n: [k // 2 + k % 2 * (n // 2) for k in range(n)]),
        ("halves of K interleaved", "Even places of K stand before the odd ones", lambda n: [*range(0, n, 2), *range(1, n, 2)]),
        ("K reversed", "The order along K is reversed", lambda n: [*range(n)][::-1]),
        ("K shifted", "Each number is that before it along K", lambda n: [max(k - 1, 0) for k in range(n)]),
        ("K shifted", "Each number is that behind it along K", lambda n: [min(k + 1, n - 1) for k in range(n)]),
    )


_PARTS_OF_K: tuple[tuple[str, str, Callable[[Tensor, int, int], Tensor]], ...] = (
    ("only the first {n} of K", "Only the first {n} columns of K are summed", lambda i, k, n: i < n),
    ("only the last tile of K, {n}", "Only the last tile of {n} columns of K is summed, as if each overwrote the sum", lambda i, k, n: i >= (k - 1) // n * n),
    ("first tile of K twice, {n}", "The first {n} columns of K are summed twice", lambda i, k, n: 1 + (i < n)),
    ("last tile of K twice, {n}", "The last tile of {n} columns of K is summed twice", lambda i, k, n: 1 + (i >= (k - 1) // n * n)),
)
"""Name, sentence, and how often each of K columns counts."""
_ORDERS: tuple[tuple[str, str, Change], ...] = (
    *(("sign of every second number lost", f"Every second number along K, from number {rest} on, loses its sign", lambda c, rest=rest: torch.where(torch.arange(c.shape[-1]) % 2 == rest, torch.where(c < 16, c & 7, c & 0x7F), c)) for rest in (0, 1)),
)


# --- the list of each kind -------------------------------------------------------------------------------------------


def of_codes() -> Iterator[Fault]:
    """Encoders and decoders."""
    yield from rows(
        _CODES,
        ("nearest, not at random", "It rounds to nearest, not at random as it is told", lambda c: {"rounding": "nearest"} if "stochastic" in (c.what.get("rounding"), c.kind == "cast" and c.spec.rounding) else None),
        ("truncates", "It rounds toward zero instead of to nearest", always(rounding="truncate")),
        ("rounds away", "It rounds every inexact number away from zero", always(rounding="away")),
        ("ties away", "A tie goes away from zero, not to the even neighbour", always(rounding="ties_away")),
        ("ties up", "A tie goes up, not to the even neighbour", always(rounding="ties_up")),
        ("ties toward zero", "A tie goes toward zero, not to the even neighbour", always(rounding="ties_down")),
        ("carry lost", "A mantissa that rounds up past its end begins at 0, and the exponent stays", always(carry="lost")),
        ("carry lost", "A mantissa that rounds up past its end stays at its end", always(carry="held")),
        ("rounds up", "It rounds every inexact number up", always(rounding="up")),
        ("rounds down", "It rounds every inexact number down", always(rounding="down")),
        ("no saturation", "Numbers beyond the format become NaN; they should saturate", always(overflow="nan")),
        ("overflow is infinity", "Numbers beyond the format become infinity; they should saturate", always(overflow="inf")),
        ("saturates", "Numbers beyond the format saturate; they should not", always(overflow="saturate")),
        ("subnormals flushed", "Results below the smallest normal number become zero", always(flush=True)),
        ("zero loses its sign", "-0 becomes 0", always(plain_zero=True)),
        ("rounds twice, BF16 first", "It rounds to BF16 before it rounds to the format", always(before=torch.bfloat16)),
        ("rounds twice, FP16 first", "It rounds to FP16 before it rounds to the format", always(before=torch.float16)),
        *((f"rounds twice, {bits} bits first", f"It rounds to {bits} significant bits before it rounds to the format", always(before=bits)) for bits in (2, 3, 4, 5, 6, 7)),
        *((f"rounds twice, cut off to {text}", f"It cuts off to {text} before it rounds to the format", always(before=-bits)) for text, bits in (("FP16's 11 bits", 11), ("BF16's 8 bits", 8))),
        *(("NaN lost", f"NaN becomes {value:g}; it should stay NaN", always(lost_nan=value)) for value in (0.0, 448.0, 240.0, 57344.0, 6.0, 1.0)),
        *((f"clamps at {top:g}", f"Larger numbers become {top:g}, below the format's largest", always(top=top)) for top in (240.0, 448.0, 416.0, 256.0, 224.0, 120.0, 49152.0, 4.0, 3.0)),
    )
    yield Fault("rounds at random", "Each result is a neighbour of the input, not always the nearest: stochastic rounding", _CODES, lambda c: {"rounding": "stochastic"} if c.kind == "cast" else {"what": {**c.what, "rounding": "stochastic"}}, True)
    yield from rows(
        ("encode",),
        ("carry into the sign", "A number beyond the largest gets the code behind it, whose bits mean something else", _carried),
        ("infinity lost", "An infinity becomes zero", changed(x=lambda x: torch.where(x.isinf(), 0.0, x))),
        ("sign lost", "The sign is dropped", changed(x=torch.abs)),
        ("sign flipped", "The sign is inverted", changed(x=torch.neg)),
        ("exponent bias off by one", "The exponent is one too large", changed(x=lambda x: x * 2)),
        ("exponent bias off by minus one", "The exponent is one too small", changed(x=lambda x: x / 2)),
        ("all zeros", "The result is zero", changed(x=torch.zeros_like)),
        ("strides ignored", "It reads memory row by row, whatever the strides are", changed(x=by_memory)),
        *((f"small inputs flushed, {fmt}", f"Inputs below {fmt}'s smallest normal number become zero", changed(x=lambda x, fmt=fmt: torch.where(x.abs().double() < fmt.min_normal, 0 * x, x))) for fmt in EIGHT),
        ("input subnormals flushed", "FP32's subnormal numbers are read as zero", changed(x=lambda x: torch.where(x.abs() < 2.0**-126, 0 * x, x))),
        *((f"{other} written", f"The codes are those of {other}", partial(_as_codes, other=other)) for other in EIGHT),
        *((f"bit {bit} lost", f"Bit {bit} of each code is zero", partial(_of_bits, change=lambda c, bit=bit: c & ~(1 << bit))) for bit in range(8)),
        ("sign at bit 7", "The sign stands in bit 7 of a byte, whatever the format", partial(_of_bits, change=lambda c: torch.where(c & 8 != 0, c & 7 | 128, c))),
    )
    yield from rows(
        ("decode",),
        *((f"read as {other}", f"Codes are read as {other}", always(fmt=other)) for other in EIGHT),
        ("subnormals flushed", "Codes of subnormal numbers are read as zero", always(flush=True)),
        ("subnormals normal", "Codes of subnormal numbers are read with a leading 1, as normal ones", always(normal=True)),
        ("exponent 0 read as normal", "Exponent 0 is read as that of a normal number: zero gets a leading 1, too", always(normal=True, zero=True)),
        *((f"values times {by:g}", f"Values are {by:g} times what they should be, as with an exponent bias off by one", always(times=by)) for by in (2.0, 0.5)),
        ("subnormals halved", "Codes of subnormal numbers get the exponent -bias, not 1 - bias: they are half as large", always(halved=True)),
        ("zero loses its sign", "-0 is read as 0", always(plain_zero=True)),
        ("read as integers", "Codes are read as integers in two's complement", always(integers=True)),
        ("largest number too large", "The largest number is read as the next power of two", always(grown=True)),
        ("NaN and infinity lost", "The codes of NaN and infinity are read as finite numbers", always(finite=True)),
        *(("NaN lost", f"The code of NaN is read as {value:g}", always(lost_nan=value)) for value in (480.0, 448.0, 0.0, torch.inf, 240.0, 57344.0)),
        ("strides ignored", "It reads memory row by row, whatever the strides are", changed(codes=partial(bytewise, by_memory))),
        ("sign lost", "The sign bit is ignored", _bits(lambda c, sign: c & (sign - 1))),
        ("sign flipped", "The sign bit is inverted", _bits(lambda c, sign: c ^ sign)),
        ("nibbles swapped", "The two halves of a byte are exchanged", _bits(lambda c, sign: (c >> 4) | (c << 4))),
        ("code off by one", "The code is one too large", _bits(lambda c, sign: c + 1)),
        ("code off by one", "The code is one too small", _bits(lambda c, sign: c - 1)),
    )


def of_casts() -> Iterator[Fault]:
    """Casts with scales."""
    yield from rows(("cast",), ("scale inverted", "scale_inv holds the scale, not its inverse", always(written=torch.reciprocal)))
    yield from _stale(
        ("cast",),
        ("scale of another step", "The scale is that of", lambda c: None if c.before is None else {"amax": c.amax(c.before["x"])}),
        ("stale result", "The result is that of", lambda c: None if c.before is None else {"x": c.before["x"]}),
    )
    yield from rows(
        ("cast",),
        ("amax never reset", "amax is the largest of all calls so far", lambda c: {"amax": c.amax().clamp(min=c.largest)} if bool(c.amax().isfinite().all()) else None),
        ("blocks over the ends of rows", "Blocks are cut from x as one list: they run on from the end of a row into the next", _over_ends),
        *((f"scale of {text}", f"The scale is that of {text}", partial(_other_blocks, blocks=blocks)) for text, blocks in _BLOCKS),
        *((f"scale of {text}", f"The scale is that of {text}, and no power of two", partial(_other_blocks, blocks=blocks, exponent="none")) for text, blocks in _BLOCKS),
        *((name, sentence, always(written=change)) for name, sentence, change in scale_faults()),
        *((f"zeros below {eps:g}", f"Blocks whose amax is below {eps:g} become zeros", lambda c, eps=eps: {"x": torch.where(c.spec.granularity.expand(c.amax(), tuple(c.inputs["x"].shape)) < eps, 0 * c.inputs["x"], c.inputs["x"])}) for eps in (2.0**-10, 1e-4, 1e-5, 2.0**-20, 1e-8, 1e-10, 2.0**-126)),
        ("amax a mean", "The scale comes from the mean magnitude", lambda c: {"amax": c.inputs["x"].abs().double().mean().reshape(1, 1)}),
        *((f"scale shared by {n} rows", f"Each {n} rows share the largest of their scales", _of_amax(lambda amax, n=n: torch.nn.functional.pad(amax, (0, 0, 0, -len(amax) % n)).reshape(-1, n, amax.shape[1]).amax(1).repeat_interleave(n, 0)[: len(amax)])) for n in (2, 4, 8, 16)),
        *((f"scale shared by {n} blocks", f"Each {n} blocks along K share the largest of their scales", _of_amax(lambda amax, n=n: torch.nn.functional.pad(amax, (0, -amax.shape[1] % n)).reshape(len(amax), -1, n).amax(2).repeat_interleave(n, 1)[:, : amax.shape[1]])) for n in (2, 4)),
        ("blocks of equal size", "A matrix is cut into equal blocks, ceil(size / number of blocks), not into whole blocks and a rest", _equal_blocks),
        ("an octave late", "Where amax is the largest number of a binade that fits, the scale is twice as large", always(exponent="open")),
        ("an octave at powers of two", "Where amax is a power of two, the scale is twice as large", _of_amax(lambda amax: torch.where(torch.frexp(amax)[0] == 0.5, 2 * amax, amax))),
        ("computes in BF16", "The scale and its product with x are rounded to BF16 before the cast", always(written=lambda s: s.float().bfloat16().double(), before=torch.bfloat16)),
        ("operand transposed", "It reads x.T", _reads(lambda x: x.t().reshape(x.shape))),
        *((name, sentence, _reads(partial(in_order, order=order))) for name, sentence, order in along_k()),
        ("clamped before it is scaled", "x is clamped to the format's range before it is scaled", lambda c: {"x": c.inputs["x"].clamp(-c.format.max, c.format.max), "amax": c.amax()}),
        ("clamped before it is scaled", "x is clamped to the format's range before amax is taken", lambda c: {"x": c.inputs["x"].clamp(-c.format.max, c.format.max)}),
        ("strides ignored", "It reads memory row by row, whatever the strides are", _reads(by_memory)),
        ("sign lost", "The sign is dropped", _reads(torch.abs)),
        ("NaN lost", "NaN is read as zero, and its block looks like any other", _reads(lambda x: torch.where(x.isnan(), torch.zeros_like(x), x))),
        ("rows reversed", "The order of rows is reversed", _reads(lambda x: x.flip(0))),
        ("all zeros", "The result is zero", _reads(torch.zeros_like)),
        *((f"{other} written", f"Codes and scales are those of {other}", partial(_cast_as, other=other, top=other.max)) for other in EIGHT),
        *((f"{other} written", f"Codes are those of {other}, scales are not", partial(_cast_as, other=other, top=None)) for other in EIGHT),
    )


_BLOCKS = (
    ("the whole tensor", PER_TENSOR), ("a row", PER_ROW), ("a column", Granularity(None, 1)), ("1 x 128", BLOCK_1X128),
    ("128 x 128", BLOCK_128X128), ("1 x 32", BLOCK_1X32), ("1 x 16", BLOCK_1X16), ("1 x 64", Granularity(1, 64)),
    ("32 x 1", Granularity(32, 1)), ("128 x 1", Granularity(128, 1)),
)
_SIZES = (16, 32, 64, 128)


def _of_operands() -> Iterator[Fault]:
    yield from rows(_SUMS, ("all zeros", "The result is zero", always(operands=torch.zeros_like)))
    def as_format(fmt: Format) -> Callable[[Tensor], Tensor | None]:
        return lambda x: None if x.dtype == fmt.dtype else x.view(torch.uint8).view(fmt.storage_dtype)

    turned = partial(bytewise, lambda y: y.mT.reshape(y.shape))
    flat = partial(bytewise, by_memory)
    for fmt in EIGHT:
        if fmt.dtype is not None:
            yield from rows(
                _SUMS,
                (f"a read as {fmt}", f"The codes of a are read as {fmt}", changed(a=as_format(fmt))),
                (f"b read as {fmt}", f"The codes of b are read as {fmt}", changed(b=as_format(fmt))),
                (f"both read as {fmt}", f"All codes are read as {fmt}", changed(**dict.fromkeys("ab", lambda x, to=fmt.dtype: x.view(torch.uint8).view(to)))),
            )
    yield from rows(
        _SUMS,
        ("b read in the format of a", "The codes of b are read in the format of a", lambda c: changed(b=lambda x: x.view(torch.uint8).view(c.inputs["a"].dtype))(c)),
        ("a read in the format of b", "The codes of a are read in the format of b", lambda c: changed(a=lambda x: x.view(torch.uint8).view(c.inputs["b"].dtype))(c)),
        *((f"scale of {side} inverted", f"scale_inv_{side} divides instead of multiplying", changed(**{f"scale_inv_{side}": _inverse})) for side in "ab"),
        *((f"{name} ({side})", f"{sentence}: scale_inv_{side}", changed(**{f"scale_inv_{side}": change})) for side in "ab" for name, sentence, change in scale_faults()),
        *((f"{name} (both)", f"{sentence}: both scales", changed(scale_inv_a=change, scale_inv_b=change)) for name, sentence, change in scale_faults()),
        ("scales inverted", "Both scales divide instead of multiplying", changed(scale_inv_a=_inverse, scale_inv_b=_inverse)),
        ("scales exchanged", "a gets the scale of b, and b that of a", _exchanged),
        ("b transposed", "b is read as (K, N), not (N, K)", changed(b=turned)),
        ("a transposed", "a is read as (K, M), not (M, K)", changed(a=turned)),
        ("strides of a ignored", "a is read row by row, whatever its strides are", changed(a=flat)),
        ("strides of b ignored", "b is read row by row, whatever its strides are", changed(b=flat)),
        ("strides ignored", "Operands are read row by row, whatever their strides are", changed(a=flat, b=flat)),
        *(("tail of K dropped", f"Columns beyond the last whole {n} of K are not summed", changed(a=partial(without_tail, size=n))) for n in (2, 4, 8, 16, 32, 64, 128, 256)),
        *((f"K runs on, {n}", f"Where K is no multiple of {n} the last tile reads on into the next row of both operands", always(operands=partial(run_on, size=n))) for n in (8, 16, 32, 64, 128)),
        ("last column of K dropped", "The last column of K is not summed", always(operands=lambda v: torch.cat([v[:, :-1], 0 * v[:, -1:]], 1))),
        ("first column of K dropped", "The first column of K is not summed", always(operands=lambda v: torch.cat([0 * v[:, :1], v[:, 1:]], 1))),
        *((f"scale bytes as numbers ({text})", f"Scale bytes are used as numbers, not as exponents: {said}", changed(**dict.fromkeys(sides, lambda s: s.float() if s.dtype == torch.uint8 else None))) for text, said, sides in (("a", "scale_inv_a", ("scale_inv_a",)), ("b", "scale_inv_b", ("scale_inv_b",)), ("both", "both scales", ("scale_inv_a", "scale_inv_b")))),
        *((f"scale bytes with a sign ({text})", f"Scale bytes are read as numbers with a sign, so from 128 on they are 2^-256 of their scale: {said}", changed(**dict.fromkeys(sides, lambda s: torch.exp2(s.view(torch.int8).double() - 127).masked_fill(s == 255, math.nan) if s.dtype == torch.uint8 else None))) for text, said, sides in (("a", "scale_inv_a", ("scale_inv_a",)), ("b", "scale_inv_b", ("scale_inv_b",)), ("both", "both scales", ("scale_inv_a", "scale_inv_b")))),
        ("scale byte 255 infinite", "The scale byte 255 is read as infinity, not as NaN", changed(**dict.fromkeys(("scale_inv_a", "scale_inv_b"), lambda s: torch.where(s == 255, math.inf, torch.exp2(s.float() - 127)) if s.dtype == torch.uint8 else None))),
        ("exponent bytes shifted", "The scale bytes 0 and 255 are read as 0 and infinity, not as 2^-127 and NaN", changed(**dict.fromkeys(("scale_inv_a", "scale_inv_b"), lambda s: (s.to(torch.int32) << 23).view(torch.float32) if s.dtype == torch.uint8 else None))),
        *((name, f"{sentence}: {text}", changed(**dict.fromkeys(sides, partial(bytewise, partial(in_order, order=order))))) for name, sentence, order in along_k() for text, sides in (("the codes of a", "a"), ("the codes of b", "b"), ("all codes", "ab"))),
        *((name.format(n=n), sentence.format(n=n), always(weights=lambda k, part=part, n=n: part(torch.arange(k), k, n).double())) for name, sentence, part in _PARTS_OF_K for n in (16, 32, 64, 128, 256)),
        *((f"only part {i + 1} of {n} of K", f"K is split in {n}, and only part {i + 1} is in the result", always(weights=lambda k, i=i, n=n: (torch.arange(k) // max(-(-k // n), 1) == i).double())) for n in (2, 4) for i in (0, n - 1)),
        *((f"scales of {side} chosen by the other side", f"The scales of {side} are chosen by the {line} of the result", always(crossed=side)) for side, line in (("a", "column"), ("b", "row"))),
        ("NaN read as 480", "The code of NaN is read as 480", always(codes=lambda v, fmt: torch.where(v.isnan(), 480.0, v))),
        *((f"{name} ({text})", f"{sentence} ({text})", changed(**dict.fromkeys(sides, partial(bytewise, change)))) for name, sentence, change in _ORDERS for text, sides in (("a", "a"), ("b", "b"), ("both", "ab"))),
        ("largest number too large", "The largest number of the format is read as the next power of two", always(codes=grown_largest)),
        *((f"FP4 read as {text}", f"The codes of E2M1 are read as {text}", always(codes=partial(fp4_as, step=step))) for text, step in (("E1M2, quarters from 0 to 1.75", 0.25), ("integers with a sign, 0 to 7", 1.0))),
        ("scales begin anew", "The scales of a begin anew with each group", lambda c: changed(scale_inv_a=lambda s: torch.cat([*(s[:n] for n in c.inputs["ends"].diff(prepend=c.inputs["ends"].new_zeros(1)).tolist()), s[c.inputs["ends"][-1] :]]))(c) if "ends" in c.inputs else None),
        ("sign lost", "Operands lose their signs", always(operands=torch.abs)),
        ("NaN lost", "NaN is read as zero", always(operands=lambda v: v.nan_to_num(0.0))),
        ("operands rounded to BF16", "Codes times scales are rounded to BF16 before they are multiplied", always(operands=lambda v: v.to(torch.bfloat16).double())),
        ("operands rounded to FP16", "Codes times scales are rounded to FP16 before they are multiplied", always(operands=lambda v: v.to(torch.float16).double())),
        ("subnormals flushed", "Codes of subnormal numbers are read as zero", changed(a=without_subnormals, b=without_subnormals)),
        *((f"NaN fills tiles of {n} rows", f"A row with NaN makes NaN of the {n} rows of its tile", always(operands=lambda v, n=n: torch.where(in_bad_tile(v.isnan().any(1), n)[:, None], math.nan, v))) for n in (4, 8, 16, 32, 64, 128)),
    )


def _of_results() -> Iterator[Fault]:
    earlier = {"a": ("a", "scale_inv_a"), "b": ("b", "scale_inv_b"), **{name: (name,) for name in ("scale_inv_a", "scale_inv_b", "ends")}}
    yield from _stale(
        _SUMS,
        *((f"{text} of an earlier call", f"It uses {text} of", _earlier(*keys)) for text, keys in earlier.items()),
        ("result of an earlier call added", "The result is added to that of", lambda c: None if c.before is None else {"plus": c.before}),
    )
    yield from rows(("attention",), *((f"{out} times {by:g}", f"{out} is {by:g} times what it should be", always(only={out: by})) for out in ("o", "dq", "dk", "dv") for by in (0.0, -1.0, 2.0, 0.5, 0.72)))
    yield from rows(
        (*_SUMS, "linear", "attention"),
        *((f"result times {by:g}", f"The result is {by:g} times what it should be", always(times=by)) for by in (-1.0, 2.0, 0.5, 0.72)),
        ("result rounded to FP16", "The result is rounded to FP16 on its way", always(through=torch.float16)),
        ("result rounded to BF16", "The result is rounded to BF16 on its way", always(through=torch.bfloat16)),
    )
    yield from _stale(("linear",), *((f"{out} of an earlier call added", f"{out} is added to that of", lambda c, out=out: None if c.before is None else {"plus": c.before, "only": {out: 1.0}}) for out in ("y", "dx", "dw")))
    yield from rows(
        _SUMS,
        *((f"columns wrap, {n}", f"The last tile of {n} columns is written beyond N: its zeros overwrite the first columns of the next row", always(wrap=n)) for n in (16, 32, 64, 128)),
        ("result transposed", "The result is written in the order of its transpose", always(turned=("out",))),
        ("negative results lost", "Negative results become zero, as behind a ReLU", always(floor=0.0)),
        ("result truncated", "The sum is cut off to the output's type, not rounded", always(cut=True)),
        ("result clamped at 448", "The result is clamped to E4M3's range", always(clamp=448.0)),
        ("result clamped at 65504", "The result is clamped to FP16's range", always(clamp=65504.0)),
    )
    yield from rows(
        ("grouped",),
        ("groups one row late", "Each group ends one row late", lambda c: {"ends": (c.inputs["ends"] + 1).clamp(max=c.inputs["ends"][-1])}),
        ("ends read as sizes", "ends are read as sizes: each group begins where the ones before end in sum", lambda c: {"ends": c.inputs["ends"].cumsum(0).clamp(max=c.inputs["ends"][-1])}),
        ("groups one row early", "Each group but the last ends one row early", lambda c: {"ends": torch.cat([(c.inputs["ends"][:-1] - 1).clamp(min=0), c.inputs["ends"][-1:]])}),
        ("empty group shifts the others", "An empty group is skipped without its weight: groups behind it take the weight of the one before", always(experts=lambda g, sizes: sum(size > 0 for size in sizes[:g]))),
        ("weight of the next group", "Each group takes the weight of the next", always(experts=lambda g, sizes: min(g + 1, len(sizes) - 1))),
        ("weight of the group before", "Each group takes the weight of the group before", always(experts=lambda g, sizes: max(g - 1, 0))),
        *((f"groups begin at multiples of {n}", f"Each group ends at a multiple of {n} rows, rounded down", lambda c, n=n: {"ends": torch.cat([c.inputs["ends"][:-1] // n * n, c.inputs["ends"][-1:]])}) for n in (4, 8, 16, 32)),
        *((f"groups end at multiples of {n}", f"Each group ends at a multiple of {n} rows, rounded up", lambda c, n=n: {"ends": (-(-c.inputs["ends"] // n) * n).clamp(max=c.inputs["ends"][-1])}) for n in (4, 8, 16, 32)),
        ("weights in reverse", "Weights are taken in reverse order", always(experts=lambda g, sizes: len(sizes) - 1 - g)),
        ("weight of the first group", "All groups take the weight of the first", always(experts=lambda g, sizes: 0)),
        *((f"{part} of the first group", f"All groups take {part} of the first", changed(**{part: partial(bytewise, lambda y: y[:1].expand(y.shape))})) for part in ("b", "scale_inv_b")),
    )
    yield from rows(_SUMS, *((f"accumulates like {name}", f"The sums are those of the accumulator {rule}", always(accumulator=name)) for name, rule in ACCUMULATORS.items()))
    yield from rows(
        (*_SUMS, "linear"),
        *((f"split in {n}", f"K is split in {n}, and the partial sums are rounded to {text} and added in {end}", always(split=(dtype, partial(ends_of, count=n, low=low), to))) for text, dtype in _HALVES for n in (2, 4, 8) for low in (False, True) for end, to in ((text, dtype), ("FP32", torch.float32))),
        *((f"slices of {n} in {text}", f"Sums of each {n} products are rounded to {text}, and added in it", always(split=(dtype, partial(ends_of, size=n), dtype))) for text, dtype in _HALVES for n in (16, 32, 64, 128, 256)),
        *((f"sums through {text}", f"Sums are rounded to {text} before they are scaled", always(steps=(dtype, 1 << 30), late=True)) for text, dtype in _HALVES),
        *((f"accumulates in {text}", f"Sums are kept in {text}, {n} products at a time{behind}", always(steps=(dtype, n), late=late)) for late, behind in ((False, ""), (True, ", and scaled at the end")) for text, dtype in _HALVES for n in (1, 2, 4, 8, 16, 32, 64, 128)),
    )
    for text, unit in (("TF32 or FP16", 2.0**-11), ("BF16", 2.0**-8)):
        yield Fault(f"accumulates in {text}", f"The errors are those of sums in {text}: beyond FP32's bound, within that of {text}", _SUMS, always(unit=unit), True)


def _of_layers() -> Iterator[Fault]:
    cells = {"x": ("fprop.lhs", "wgrad.rhs"), "the weight": ("fprop.rhs", "dgrad.rhs"), "the gradient": ("dgrad.lhs", "wgrad.lhs")}
    operands = cells | {f"every {gemm} operand": (f"{gemm}.lhs", f"{gemm}.rhs") for gemm in GEMMS} | {"anything": CELLS}
    yield from _stale(("linear",), *((f"{side} of the step before", f"It uses the {side} of", _earlier(side)) for side in ("x", "weight", "grad")))
    other = {"fprop.lhs": "wgrad.rhs", "fprop.rhs": "dgrad.rhs", "dgrad.lhs": "wgrad.lhs"}
    turned = other | {b: a for a, b in other.items()}
    for cell, twin in turned.items():
        (gemm, side), text = cell.split("."), "is cast from what was cast along the other dimension"
        operands = {f"the {'left' if side == 'lhs' else 'right'} operand of {gemm}": (cell,)} | operands
        yield from rows(("linear",), (f"{cell} rounded twice", f"{next(iter(operands)).capitalize()} {text}", lambda c, own=cell, twin=twin: None if None in (c.cell(own), c.cell(twin)) else {"cells": {own: {"twice": c.cell(twin)}}}))
    for sides in (("fprop", "dgrad"), ("wgrad",)):  # the other cast of each operand, where there is one
        mine = {place: turned[place] for place in CELLS if place.split(".")[0] in sides and place in turned}
        said = f"The operands of {' and '.join(sides)} are those that were cast along the other dimension"
        yield from rows(("linear",), ("casts along the wrong dimension", said, lambda c, mine=mine: {"cells": {own: {"turned": c.cell(other)} for own, other in mine.items() if c.cell(other) is not None}}))
    for text, places in operands.items():
        yield from rows(
            ("linear",),
            (f"no cast of {text}", f"It does not quantize {text.replace('every', 'any')}", always(cells=dict.fromkeys(places, "skip"))),
            *((f"{text}: {name}", f"{text[0].upper()}{text[1:]} {sentence}", always(cells=dict.fromkeys(places, knobs))) for name, sentence, knobs in _casts(len(places) == 1)),
        )
    yield from rows(
        ("linear",),
        *((f"scale of {side} of the step before", f"The scale of {side} is that of the call before", partial(_stale_cells, side=side, places=where)) for side, where in zip(("x", "weight", "grad"), cells.values(), strict=True)),
        *((f"scale of {mine} is that of {other}", f"It casts {mine} with the scale of {other}", partial(_theirs, places=cells[mine], side=other.removeprefix("the "))) for mine, other in permutations(cells, 2)),
        *((f"scale of {text} of a sequence", f"All tokens of a sequence have the scale of {text}: x", partial(_of_sequence, first=first)) for text, first in (("its first token", True), ("its largest token", False))),
        *((f"{out} transposed", f"{out} is written in the order of its transpose", always(turned=(out,))) for out in ("y", "dx", "dw")),
        *((f"{side} in another order", f"The rows of {side} are taken in the order (S, B), not (B, S)", changed(**{side: lambda x: x.transpose(0, 1).reshape(x.shape) if x.dim() > 2 else None})) for side in ("x", "grad")),
        ("no gradient of the weight", "dw is zero", always(only={"dw": 0.0})),
        ("no gradient of the input", "dx is zero", always(only={"dx": 0.0})),
        ("weight transposed", "The weight is read as (K, N)", changed(weight=lambda w: w.t().reshape(w.shape))),
        *((f"{end} sequence only", f"Only the {end} sequence of the batch is summed", partial(_rows_kept, count=lambda shape: math.prod(shape[1:-1] if len(shape) > 2 else shape), last=end == "last")) for end in ("first", "last")),
        ("first half of the rows", "Only the first half of the rows is summed", partial(_rows_kept, count=lambda shape: max(math.prod(shape[:-1]) // 2, 1))),
        ("gradient transposed", "The gradient is read in the order of its transpose", changed(grad=lambda g: g.reshape(-1, g.shape[-1]).t().reshape(g.shape))),
        ("x transposed", "x is read in the order of its transpose", changed(x=lambda x: x.reshape(-1, x.shape[-1]).t().reshape(x.shape))),
        ("strides ignored", "x is read row by row, whatever its strides are", changed(x=by_memory)),
        ("strides ignored", "The gradient is read row by row, whatever its strides are", changed(grad=by_memory)),
        *(("tail of rows dropped", f"Rows beyond the last whole {n} are left out", partial(_rows_kept, count=lambda shape, n=n: math.prod(shape[:-1]) // n * n)) for n in (16, 32, 64, 128)),
        ("mean over rows", "dw is the mean over rows, not the sum", lambda c: {"only": {"dw": 1 / max(1, c.inputs["x"][..., 0].numel())}}),
        *((f"recipe {name}", f"The numbers are those of recipe {name}", _told(recipe=lambda what, name=name: name)) for name, recipe in RECIPES.items() if not recipe.predicted),
    )


def _casts(alone: bool) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Of one operand of one GEMM alone, or of several."""
    yield from ((f"read as {fmt}", f"has codes that are read as {fmt}", {"read": fmt}) for fmt in EIGHT if fmt.bits == 8)
    if alone:
        yield from ((f"scale of {name}", f"has the scale of {name}", {"granularity": blocks}) for name, blocks in _BLOCKS)
        yield "without its scale", "is multiplied without its scale", {"misread": torch.ones_like}
        yield from ((name, f"is multiplied with other scales. {sentence}", {"misread": change}) for name, sentence, change in scale_faults()[:9])
        yield "scale of 448", "is read with the scale of a cast to 448, E4M3's largest", {"other_top": 448.0}
        return
    yield from (
        *((f"in {fmt}", f"is cast to {fmt}, not to the recipe's format", {"format": fmt}) for fmt in EIGHT),
        ("rounded at random", "is rounded stochastically", {"rounding": "stochastic"}),
        ("scale of the whole tensor", "has the scale of the whole tensor", {"granularity": PER_TENSOR}),
    )


def _of_attention() -> Iterator[Fault]:
    def scaled(scale: Callable[[int, int], float]) -> Knobs:
        return lambda c: {"scale": scale(c.inputs["q"].shape[-1], c.inputs["v"].shape[-1])}

    yield from rows(
        ("attention",),
        ("causal mask one late", "A query sees one key too many", always(offset=1)),
        ("causal mask one early", "A query does not see its own key", always(offset=-1)),
        ("no causal mask", "The causal mask is missing", always(causal=False)),
        ("causal mask where none is", "A causal mask hides later keys", always(causal=True)),
        *((f"causal mask of tiles of {n}", f"The causal mask hides whole tiles of {n} keys only: in its own tile a query sees later keys", always(tile=n)) for n in (8, 16, 32, 64, 128)),
        *((f"sums not rescaled, {n}", f"The sum of values is not rescaled where a later tile of {n} keys has a larger score", always(rescaled=n)) for n in (8, 16, 32, 64, 128)),
        *((f"sums not rescaled by little, {n}", f"The sum of values is rescaled behind a tile of {n} keys only where a score is larger by {by} octaves or more", always(rescaled=n, lazy=by)) for n in (8, 16, 32, 64, 128) for by in (8, 4)),
        *((f"last tile in the backward, {n}", f"The backward keeps only the last tile of {n} keys for dq, and of {n} queries for dk and dv", always(last=n)) for n in (8, 16, 32, 64, 128)),
        *((f"{text} as (B, S, H, D)", f"{text[0].upper()}{text[1:]} is read as (B, S, H, D), not (B, H, S, D)", changed(**dict.fromkeys(sides, lambda x: x.reshape(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)))) for text, sides in (("q", ("q",)), ("k", ("k",)), ("v", ("v",)), ("grad", ("grad",)), ("everything", ("q", "k", "v", "grad")))),
        ("dv of unnormalized probabilities", "dv is made of probabilities that are not divided by their sum", always(fault="dv not normalized")),
        ("no softmax scale", "Scores are not divided by sqrt(D)", always(scale=1.0)),
        *((f"padded keys seen, {n}", f"Keys are padded with zeros to a multiple of {n}, and the padding takes part in softmax", always(pad=n)) for n in (8, 16, 32, 64, 128)),
        *((f"{part} cast to {fmt}", f"{text} to {fmt.upper()}, which the recipe does not ask for", always(casts={part: fmt})) for part, text in _ATTENTION.items() for fmt in ("e4m3", "e5m2")),
        *((f"{part} not cast", f"{text} by no cast, which the recipe asks for", lambda c, part=part: {"casts": {part: "skip"}} if c.what.get("recipe") == "fp8" else None) for part, text in _ATTENTION.items()),
        *((f"window of {n}", f"A query sees the last {n} keys only", always(window=n)) for n in (2, 4, 8, 16, 32, 64, 128)),
        *((f"{part} in {text}", f"{said} rounded to {text}", always(rounded={part: dtype})) for part, said in (("scores", "Scores are"), ("p", "Probabilities are")) for text, dtype in _HALVES),
        ("softmax not normalized", "Probabilities are not divided by their sum", always(fault="not normalized")),
        ("gradients without the softmax scale", "dq and dk lack the factor 1 / sqrt(D)", always(fault="gradients without scale")),
        ("no correction of dS", "dS lacks the row sum of dO * O", always(fault="no delta")),
        ("softmax scale 1 / D", "Scores are divided by D, not by its root", scaled(lambda d, dv: 1 / d)),
        ("softmax scale of v", "Scores are divided by the root of v's D", scaled(lambda d, dv: dv**-0.5)),
        ("softmax scale upside down", "Scores are multiplied by sqrt(D)", scaled(lambda d, dv: d**0.5)),
        ("softmax in base 2", "exp2 is taken of scores in base e", scaled(lambda d, dv: d**-0.5 * math.log(2))),
        ("softmax in base 2 twice", "log2(e) is applied, and then exp", scaled(lambda d, dv: d**-0.5 / math.log(2))),
        ("softmax scale of a padded D", "Scores are divided by the root of D padded to a power of two", scaled(lambda d, dv: (1 << (d - 1).bit_length()) ** -0.5)),
        *((f"softmax scale of a padded D, {n}", f"Scores are divided by the root of D padded to a multiple of {n}", scaled(lambda d, dv, n=n: (-(-d // n) * n) ** -0.5)) for n in (8, 16, 32, 64, 128)),
        *((f"scale of {said} left out", f"o is not multiplied by the inverse scale of {said}", lambda c, of=of: {"only": {"o": 448.0 / max(float(c.inputs[i].float().abs().max()) for i in of)}} if all(c.inputs[i].numel() and bool(c.inputs[i].any()) for i in of) else None) for said, of in (("v", "v"), ("q, k and v", "qkv"))),
        *((f"{side} of the first head", f"All heads read {side} of the first", changed(**{side: lambda x: x[:, :1].expand(x.shape)})) for side in ("q", "k", "v", "grad")),
        *((f"{side} of the first batch", f"All batches read {side} of the first", changed(**{side: lambda x: x[:1].expand(x.shape)})) for side in ("q", "k", "v", "grad")),
        *(("tail of keys dropped", f"Keys beyond the last whole {n} are not seen", lambda c, n=n: {"keys": c.inputs["k"].shape[2] // n * n}) for n in (8, 16, 32, 64, 128)),
    )


_ATTENTION = MappingProxyType({"qkv": "q, k and v go", "s": "Probabilities go", "o": "o goes", "do": "grad goes", "dp": "The gradient of the scores goes", "dqkv": "dq, dk and dv go"})


def _of_optimizers() -> Iterator[Fault]:
    settings = {"eps": (1e-6, 1e-5, 1e-10, 0.0, 1e-3), "lr": (0.0,), "weight_decay": (0.1, 0.01), "betas": ((0.9, 0.99), (0.9, 0.95), (0.9, 0.999), (0.95, 0.999), (0.0, 0.999))}
    yield from rows(
        ("optimizer",),
        ("decay without effect", "Weight decay is missing, or BF16 rounds it away before the step is subtracted", lambda c: {"fault": ("no decay",)} if c.inputs["parameter"].dtype == torch.bfloat16 and c.what.get("lr", 1e-3) * c.what.get("weight_decay", 0.01) < 2.0**-9 else None),
        *((fault, sentence, always(fault=(fault,))) for fault, sentence in OPTIMIZERS),
        *((f"{name} {value}", f"It uses {name} = {value}, whatever it is told", _told(**{name: lambda what, v=value: v})) for name, values in settings.items() for value in values),
        *((f"{name} in BF16", f"{name} is {text} to BF16", _told(**{name: lambda what, name=name, bits=bits: _short(what.get(name, _DEFAULTS[name]), bits)})) for text, bits in _TO_BF16 for name in _DEFAULTS),
        *((f"beta{i + 1} in BF16", f"beta{i + 1} is {text} to BF16", _told(betas=lambda what, i=i, bits=bits: tuple(_short(beta, bits) if i == j else beta for j, beta in enumerate(what.get("betas", (0.9, 0.999)))))) for text, bits in _TO_BF16 for i in (0, 1)),
        *((f"lr times {by:g}", f"The learning rate is {by:g} times what it should be", _told(lr=lambda what, by=by: by * float(what.get("lr", 1e-3)))) for by in (2.0, 0.5, 10.0, 0.1)),
        *((f"gradient times {by:g}", f"The gradient is {by:g} times what it should be", changed(grad=lambda g, by=by: g * by)) for by in (2.0, 0.5, 10.0, 0.1)),
        *((f"gradient in {text}", f"The gradient is rounded to {text} first", changed(grad=lambda g, to=dtype: g.to(to).to(g.dtype))) for text, dtype in _HALVES),
        *((f"moments in {text}", f"Moments are kept in {text}", always(moments=(text, text))) for text in ("bf16", "int8", "fp8", "fp32")),
        *((f"first moment in {text}", f"The first moment is kept in {text}", always(moments=(text, None))) for text in ("bf16", "int8", "fp8", "fp32")),
        *((f"second moment in {text}", f"The second moment is kept in {text}", always(moments=(None, text))) for text in ("bf16", "int8", "fp8", "fp32")),
        ("parameter in BF16", "The parameter is rounded to BF16 in every step", changed(parameter=lambda p: p.to(torch.bfloat16))),
    )


_TO_BF16 = (("rounded", 8), ("cut off", -8))
"""How, and its significant bits as `significant` takes them."""
_DEFAULTS = MappingProxyType({"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.01})
OPTIMIZERS = (
    ("no bias correction", "Moments are not divided by 1 - beta ** step"),
    ("first moment uncorrected", "The first moment is not divided by 1 - beta1 ** step"),
    ("second moment uncorrected", "The second moment is not divided by 1 - beta2 ** step"),
    ("corrections multiply", "Moments are multiplied by 1 - beta ** step, not divided"),
    ("decay coupled", "Weight decay goes into the gradient (L2), not into the parameter"),
    ("decay without lr", "Weight decay is not multiplied by the learning rate"),
    ("no decay", "Weight decay is missing"),
    ("decay corrected", "Weight decay is multiplied by the learning rate over 1 - beta1 ** step"),
    ("decay factor rounded", "The factor 1 - lr * weight_decay is rounded to BF16"),
    ("decay rounded", "The parameter is rounded to BF16 behind its decay, before the step is subtracted"),
    ("decay after the step", "Weight decay multiplies the parameter after the step"),
    ("betas swapped", "beta1 and beta2 are exchanged"),
    ("betas of moments swapped", "beta1 and beta2 are exchanged in the moments, not in their corrections"),
    ("first moment rounded", "The first moment is rounded to BF16 before it is used"),
    ("second moment rounded", "The second moment is rounded to BF16 before it is used"),
    ("step one late", "The bias correction uses step - 1"),
    ("step one early", "The bias correction uses step + 1"),
    ("step stays 1", "The bias correction uses step 1 for every step"),
    ("step counted twice", "The bias correction uses 2 * step"),
    ("moments begin as the gradient", "The first gradient goes into the moments undamped"),
    ("clipped norm", "The gradient is scaled down to norm 1"),
    ("clipped", "The gradient is clamped to 1"),
    ("no second moment", "The step does not divide by the root of the second moment"),
    ("sign of the first moment", "Only the sign of the first moment is used"),
    ("momentum undamped", "The first moment adds the gradient without 1 - beta1"),
    ("gradient not squared", "The second moment is a mean of magnitudes, not of squares"),
    ("eps under the root", "eps is added under the root"),
    ("eps corrected too", "eps is divided by the root of the second moment's correction"),
    ("no root", "The step divides by the second moment, not by its root"),
    ("sign", "The step has the wrong sign"),
    ("nesterov", "The step looks ahead, as Nesterov's does"),
    ("gradients add up", "Gradients of earlier steps are never cleared: each adds to them"),
    ("moments of the step before", "The step uses the moments before this gradient goes into them"),
    ("first correction of beta2", "The first moment is divided by 1 - beta2 ** step"),
    ("second correction of beta1", "The second moment is divided by 1 - beta1 ** step"),
    ("gradient of the step before", "It uses the gradient of the step before"),
    ("moments forgotten", "Moments start from zero in each step"),
    ("zero gradients skipped", "Where the gradient is zero, nothing is done: no decay of weight and moments"),
)


# fmt: on


def all_hypotheses() -> Iterator[Fault]:
    """Every way of being wrong, in the order in which they are preferred."""
    for faults in (of_codes, of_casts, _of_operands, _of_results, _of_layers, _of_attention, _of_optimizers):
        yield from faults()
