"""Ways of being wrong, of codes and casts. Each turns the reference into that of a faulty kernel.

An entry is a name, a sentence, the kinds that it is for, and a function of the call: it returns the knobs of
`judge.expect`, and `inputs` among them where the fault changes what is read; None where the fault has no meaning there.
Earlier entries win a draw, so narrow ones come first.
"""

# ruff: noqa: E501  (an entry is a line)
# mypy: disable-error-code="misc"
# (a lambda with a default has no type that mypy infers)
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ottava.numerics.formats import FORMATS, Format, get_format
from ottava.numerics.rounding import encode
from ottava.numerics.scaling import BLOCK_1X16, BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, PER_ROW, PER_TENSOR, Granularity
from ottava.prove.judge import (
    block_amax,
    cast_spec,
    numbers_of,
    on_grid,
    scale_inv_of,
)


class Asked(NamedTuple):
    """What a hypothesis may look at."""

    kind: str
    inputs: Mapping[str, Any]
    what: Mapping[str, Any]
    before: Mapping[str, Any] | None
    """The inputs of the call before, of the same shapes; None: there was none."""


class Fault(NamedTuple):
    """A way of being wrong."""

    name: str
    sentence: str
    kinds: tuple[str, ...]
    knobs: Callable[[Asked], dict[str, Any] | None]
    loose: bool = False
    """Whether it allows more than one number, so that it explains too easily."""


Knobs = Callable[[Asked], dict[str, Any] | None]
_CODES, SUMS = ("encode", "cast"), ("gemm", "grouped")
EIGHT = tuple(fmt for fmt in FORMATS.values() if fmt.bits <= 8 and fmt.name != "E8M0")


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


# --- codes -----------------------------------------------------------------------------------------------------------


def _format_of(call: Asked) -> Format | None:
    if call.kind == "cast":
        spec = cast_spec(call.what)
        return None if spec is None else spec.format
    return get_format(call.what.get("format", "e4m3"))


# fmt: off


def rows(kinds: tuple[str, ...], *entries: tuple[str, str, Knobs]) -> Iterator[Fault]:
    """Entries of the same kinds: (name, sentence, knobs)."""
    yield from (Fault(name, sentence, kinds, knobs) for name, sentence, knobs in entries)


def of_codes() -> Iterator[Fault]:
    """Encoders and decoders."""
    yield from rows(
        _CODES,
        ("truncates", "It rounds toward zero instead of to nearest", always(rounding="truncate")),
        ("rounds away", "It rounds every inexact number away from zero", always(rounding="away")),
        ("ties away", "A tie goes away from zero, not to the even neighbour", always(rounding="ties_away")),
        ("ties up", "A tie goes up, not to the even neighbour", always(rounding="ties_up")),
        ("ties toward zero", "A tie goes toward zero, not to the even neighbour", always(rounding="ties_down")),
        ("rounds up", "It rounds every inexact number up", always(rounding="up")),
        ("rounds down", "It rounds every inexact number down", always(rounding="down")),
        ("no saturation", "Numbers beyond the format become NaN; they should saturate", always(overflow="nan")),
        ("overflow is infinity", "Numbers beyond the format become infinity; they should saturate", always(overflow="inf")),
        ("saturates", "Numbers beyond the format saturate; they should not", always(overflow="saturate")),
        ("subnormals flushed", "Results below the smallest normal number become zero", always(flush=True)),
        ("zero loses its sign", "-0 becomes 0", always(plain_zero=True)),
        ("rounds twice, BF16 first", "It rounds to BF16 before it rounds to the format", always(before=torch.bfloat16)),
        ("rounds twice, FP16 first", "It rounds to FP16 before it rounds to the format", always(before=torch.float16)),
        ("subnormals flushed, ties away", "Small results become zero, and ties go away from zero", always(flush=True, rounding="ties_away")),
        *(("NaN lost", f"NaN becomes {value:g}; it should stay NaN", always(lost_nan=value)) for value in (0.0, 448.0, 240.0, 57344.0, 6.0, 1.0)),
        *((f"clamps at {top:g}", f"Larger numbers become {top:g}, below the format's largest", always(top=top)) for top in (240.0, 416.0, 256.0, 224.0, 120.0, 49152.0, 4.0, 3.0)),
    )
    yield Fault("rounds at random", "Each result is a neighbour of the input, not always the nearest: stochastic rounding", _CODES, _neighbours, True)
    yield from rows(
        ("encode",),
        ("infinity lost", "An infinity becomes zero", changed(x=lambda x: torch.where(x.isinf(), 0.0, x))),
        ("sign lost", "The sign is dropped", changed(x=torch.abs)),
        ("sign flipped", "The sign is inverted", changed(x=torch.neg)),
        ("exponent bias off by one", "The exponent is one too large", changed(x=lambda x: x * 2)),
        ("exponent bias off by minus one", "The exponent is one too small", changed(x=lambda x: x / 2)),
        ("all zeros", "The result is zero", changed(x=torch.zeros_like)),
        ("strides ignored", "It reads memory row by row, whatever the strides are", changed(x=by_memory)),
        ("input subnormals flushed", "FP32's subnormal numbers are read as zero", changed(x=lambda x: torch.where(x.abs() < 2.0**-126, 0 * x, x))),
        *((f"{other} written", f"The codes are those of {other}", partial(_as_codes, other=other)) for other in EIGHT),
    )
    yield from rows(
        ("decode",),
        *((f"read as {other}", f"Codes are read as {other}", always(fmt=other)) for other in EIGHT),
        ("subnormals flushed", "Codes of subnormal numbers are read as zero", always(flush=True)),
        ("NaN and infinity lost", "The codes of NaN and infinity are read as finite numbers", always(finite=True)),
        *(("NaN lost", f"The code of NaN is read as {value:g}", always(lost_nan=value)) for value in (480.0, 448.0, 0.0, torch.inf, 240.0, 57344.0)),
        ("strides ignored", "It reads memory row by row, whatever the strides are", changed(codes=lambda x: bytes_of(x, by_memory))),
        ("sign lost", "The sign bit is ignored", _bits(lambda c: c & 0x7F)),
        ("sign flipped", "The sign bit is inverted", _bits(lambda c: c ^ 0x80)),
        ("nibbles swapped", "The two halves of a byte are exchanged", _bits(lambda c: (c >> 4) | (c << 4))),
        ("code off by one", "The code is one too large", _bits(lambda c: c + 1)),
        ("code off by one", "The code is one too small", _bits(lambda c: c - 1)),
    )


# fmt: on


def _bits(change: Callable[[Tensor], Tensor]) -> Knobs:
    return changed(codes=lambda c: change(c.view(torch.uint8)).view(c.dtype))


def _neighbours(call: Asked) -> dict[str, Any] | None:
    return {"rounding": "stochastic"} if call.kind == "cast" else {"what": {**call.what, "rounding": "stochastic"}}


def _as_codes(call: Asked, other: Format) -> dict[str, Any] | None:
    """An encoder of another format, whose codes are read in the right one."""
    fmt = _format_of(call)
    assert fmt is not None
    if other == fmt:
        return None
    x = call.inputs["x"]
    codes = encode(on_grid(x, other).float(), other).view(torch.uint8)
    values = numbers_of(codes, fmt)
    return {"values": values}


# --- casts -----------------------------------------------------------------------------------------------------------


# fmt: off


def of_casts() -> Iterator[Fault]:
    """Casts with scales."""
    yield from rows(
        ("cast",),
        ("scale inverted", "scale_inv holds the scale, not its inverse", always(written=torch.reciprocal)),
        ("scale of another step", "The scale is that of the call before", _stale_amax),
        ("stale result", "The result is that of the call before", lambda c: None if c.before is None else {"x": c.before["x"]}),
        *((f"scale of {text}", f"The scale is that of {text}", partial(_other_blocks, blocks=blocks)) for text, blocks in _BLOCKS),
        *((f"scale of {text}", f"The scale is that of {text}, and no power of two", partial(_other_blocks, blocks=blocks, exponent="none")) for text, blocks in _BLOCKS),
        ("OCP's floor for the scale", "The exponent of the scale is floor(log2(amax)) - emax, so the largest numbers saturate", always(exponent="floor")),
        ("scale no power of two", "The scale is max / amax, not a power of two", always(exponent="none")),
        *((f"scale rounded {text}", f"The multiplier is a power of two rounded {text}; the recipe asks for another rule", always(exponent=text)) for text in ("up", "down", "nearest", "ceil")),
        *((f"scaled to {top:g}", f"The largest number of a block goes to {top:g}, not to the format's largest", always(scale_top=top)) for top in _TOPS),
        *((name, sentence, always(written=change)) for name, sentence, change in scale_faults()),
        ("amax without the negative numbers", "amax looks at x, not at its magnitude", _amax(lambda x: x.clamp(min=0))),
        ("amax without the last column", "amax leaves out the last columns", _amax(lambda x: torch.cat([x[:, :-1], 0 * x[:, -1:]], 1))),
        *(("amax without the tail", f"amax leaves out columns beyond the last whole {n}", _amax(partial(_cut, count=n))) for n in _SIZES),
        *(("amax without the tail of rows", f"amax leaves out rows beyond the last whole {n}", _amax(lambda x, n=n: _cut(x.t(), n).t())) for n in _SIZES),
        ("amax of the block before", "A block has the scale of the block before it", partial(_rolled, by=1)),
        ("amax of the block behind", "A block has the scale of the block behind it", partial(_rolled, by=-1)),
        ("amax of the first block", "All blocks have the scale of the first", lambda c: {"amax": _own(c)[:1, :1]}),
        *((f"amax at least {eps:g}", f"amax ends at {eps:g}, so small numbers lose bits", lambda c, eps=eps: {"amax": _own(c).clamp(min=eps)}) for eps in (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8)),
        ("amax a mean", "The scale comes from the mean magnitude", lambda c: {"amax": c.inputs["x"].abs().double().mean().reshape(1, 1)}),
        ("amax in FP16", "amax is rounded to FP16", lambda c: {"amax": _own(c).half().double()}),
        ("operand transposed", "It reads x.T", _reads(lambda x: x.t().reshape(x.shape))),
        ("strides ignored", "It reads memory row by row, whatever the strides are", _reads(by_memory)),
        ("sign lost", "The sign is dropped", _reads(torch.abs)),
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
_TOPS = (240.0, 224.0, 256.0, 57344.0, 448.0, 127.0, 128.0, 1.0, 6.0, 4.0, 512.0, 896.0, 464.0, 416.0, 480.0)
_SIZES = (16, 32, 64, 128)


# fmt: on


def _reads(change: Callable[[Tensor], Tensor | None]) -> Knobs:
    return lambda call: None if (new := change(call.inputs["x"])) is None else {"x": new}


def _own(call: Asked) -> Tensor:
    spec = cast_spec(call.what)
    assert spec is not None
    return block_amax(call.inputs["x"], spec.granularity)


def _amax(change: Callable[[Tensor], Tensor]) -> Knobs:
    def knobs(call: Asked) -> dict[str, Any] | None:
        spec, x = cast_spec(call.what), call.inputs["x"]
        assert spec is not None
        return {"amax": block_amax(change(x), spec.granularity)} if x.numel() else None

    return knobs


def _stale_amax(call: Asked) -> dict[str, Any] | None:
    spec = cast_spec(call.what)
    assert spec is not None
    return None if call.before is None else {"amax": block_amax(call.before["x"], spec.granularity)}


def _cut(x: Tensor, count: int) -> Tensor:
    y = x.clone()
    y[:, x.shape[1] // count * count :] = 0
    return y


def by_memory(x: Tensor) -> Tensor | None:
    """What a kernel reads that takes a tensor for contiguous."""
    if x.is_contiguous() or 0 in x.stride():
        return None
    return torch.as_strided(x, x.shape, (x.shape[1], 1), x.storage_offset())


def _rolled(call: Asked, by: int) -> dict[str, Any] | None:
    amax = _own(call)
    return {"amax": amax.roll(by, 1 if amax.shape[1] > 1 else 0)} if amax.numel() > 1 else None


def _other_blocks(call: Asked, blocks: Granularity, exponent: str | None = None) -> dict[str, Any] | None:
    """amaxes of other blocks, as far as one of them serves a whole block of the recipe."""
    spec, x = cast_spec(call.what), call.inputs["x"]
    assert spec is not None
    if blocks == spec.granularity or not x.numel():
        return None
    shape = (x.shape[0], x.shape[1])
    each = blocks.expand(block_amax(x, blocks), shape).expand(shape)
    height, width = spec.granularity.block_shape(shape)
    return {"amax": each[::height, ::width], "exponent": exponent}


def _cast_as(call: Asked, other: Format, top: float | None) -> dict[str, Any] | None:
    from dataclasses import replace

    spec, x = cast_spec(call.what), call.inputs["x"]
    assert spec is not None
    if other == spec.format or not x.numel():
        return None
    mine = replace(spec, format=other) if spec.scale_format != "e4m3" else spec
    scale = scale_inv_of(block_amax(x, spec.granularity), mine, top or spec.format.max)
    z = x.double() / spec.granularity.expand(scale, (x.shape[0], x.shape[1]))
    codes = encode(on_grid(z, other).float(), other).view(torch.uint8)
    return {"values": numbers_of(codes, spec.format), "scale_top": top}


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, of bytes too."""
    if scale.dtype == torch.uint8:
        return (254 - scale.to(torch.int32)).clamp(0, 254).to(torch.uint8)
    return scale.reciprocal()


def _transposed(scale: Tensor) -> Tensor:
    return scale.mT.contiguous().reshape(scale.shape) if scale.dim() > 1 else scale


def _scaled(factor: float) -> Callable[[Tensor], Tensor]:
    def change(scale: Tensor) -> Tensor:
        if scale.dtype == torch.uint8:
            step = {2.0: 1, 0.5: -1}.get(factor, 0)
            return (scale.to(torch.int32) + step).clamp(0, 254).to(torch.uint8)
        return scale * factor

    return change


def _ones(scale: Tensor) -> Tensor:
    return torch.full_like(scale, 127 if scale.dtype == torch.uint8 else 1)


def _squared(scale: Tensor) -> Tensor:
    return (
        (2 * scale.to(torch.int32) - 127).clamp(0, 254).to(torch.uint8) if scale.dtype == torch.uint8 else scale * scale
    )


def _one_for_all(scale: Tensor) -> Tensor:
    return scale.flatten()[:1].expand(scale.numel()).reshape(scale.shape) if scale.numel() else scale


def _largest(scale: Tensor) -> Tensor:
    return scale.amax().expand(scale.shape) if scale.numel() else scale


def _shift(by: int, dim: int) -> Callable[[Tensor], Tensor | None]:
    return lambda scale: scale.roll(by, dim) if scale.dim() >= -dim and scale.shape[dim] > 1 else None


def _repeated_last(scale: Tensor) -> Tensor | None:
    return torch.cat([scale[..., 1:], scale[..., -1:]], -1) if scale.dim() and scale.shape[-1] > 1 else None


# fmt: off


def scale_faults() -> Sequence[tuple[str, str, Callable[[Tensor], Any]]]:
    """What may happen to scales: name, sentence, change."""
    return (
        ("scale transposed", "Scales are read in the order of the transpose", _transposed),
        ("scale shifted by one block", "A block gets the scale of the block before it, along K", _shift(1, -1)),
        ("scale shifted by one block", "A block gets the scale of the block behind it, along K", _shift(-1, -1)),
        ("scale shifted by one block", "A block gets the scale of the block behind it, and the last its own", _repeated_last),
        ("scale shifted by one row", "A row gets the scale of the row before it", _shift(1, -2)),
        ("scale shifted by one row", "A row gets the scale of the row behind it", _shift(-1, -2)),
        ("scale ignored", "The scale is taken for 1", _ones),
        ("scale squared", "The scale is applied twice", _squared),
        ("first scale for all", "The first scale is used for all blocks", _one_for_all),
        ("largest scale for all", "The largest scale is used for all blocks", _largest),
        ("scale doubled", "The scale is twice as large (an exponent bias of 126)", _scaled(2.0)),
        ("scale halved", "The scale is half as large (an exponent bias of 128)", _scaled(0.5)),
        ("first scale of each row", "Each row uses its first scale for all of K", lambda s: s[..., :1].expand(s.shape) if s.dim() > 1 else None),
        ("first scale of each column", "The scales of the first row are used for all rows", lambda s: s[..., :1, :].expand(s.shape) if s.dim() > 1 else None),
        ("scale in BF16", "The scale is rounded to BF16", lambda s: s.to(torch.bfloat16).to(s.dtype) if s.dtype != torch.uint8 else None),
        ("scale in FP16", "The scale is rounded to FP16", lambda s: s.to(torch.float16).to(s.dtype) if s.dtype != torch.uint8 else None),
        ("scale a power of two", "The scale is rounded down to a power of two", lambda s: torch.exp2(s.log2().floor()) if s.dtype != torch.uint8 else None),
        ("scale a power of two", "The scale is rounded up to a power of two", lambda s: torch.exp2(s.log2().ceil()) if s.dtype != torch.uint8 else None),
    )


# fmt: on


def bytes_of(x: Tensor, change: Callable[[Tensor], Tensor | None]) -> Tensor | None:
    """A change of where codes lie."""
    if x.dtype.itemsize != 1:
        return change(x)
    new = change(x.view(torch.uint8))
    return None if new is None else new.contiguous().view(x.dtype)
