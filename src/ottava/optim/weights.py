"""How an optimizer reads a parameter in FP32, and writes it back after the update.

    FP32 (or FP64) parameters        are updated where they lie
    16 bits, no master               rounded to the nearest, or stochastically
    16 bits, master="fp32"           4 bytes more; the parameter is the master, rounded to the nearest
    BF16, master="remainder"         2 bytes more: the 16 bits that the rounding to BF16 took from an FP32 master
    FP8, master="fp32"               4 bytes more; codes and scales are written in the same step, from the master
    FP8, master="remainder"          2 bytes more: the distance from the code to the master, in 2**-15 of the code's ulp

If an FP8 weight keeps its values from before the cast, the master starts from them and frees them. A master that starts
from the codes keeps their rounding error for ever (TransformerEngine #1121).

A weight belongs to its owner. An element that is not the rounding of its master was written by somebody else
(load_state_dict, pruning, averaging); its master is the written number from then on. All others keep every bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from ottava.base.errors import unknown_name
from ottava.numerics.rounding import decode, encode_, random_bits, random_bits_at
from ottava.numerics.scaling import amax
from ottava.optim.storage import Stored
from ottava.weights.parameter import QuantizedWeight, is_quantized_weight

Master = Literal["fp32", "remainder"]
"""The choices of `master`."""
_BEYOND: Mapping[str, float] = MappingProxyType({"e8m0_floor": 4 / 3, "e4m3": 1.5})
"""How many times a format's maximum the numbers are that scales of this kind may saturate; others saturate none."""


class Piece(NamedTuple):
    """A parameter, or a slice of its flat elements, with the state of these elements."""

    parameter: Tensor
    """The whole parameter."""
    weight: Tensor
    """The elements, in the parameter's memory."""
    gradient: Tensor
    """The gradient of these elements."""
    step: Tensor
    """Steps of the parameter, this one included; FP32 ()."""
    state: Mapping[str, Tensor]
    """The weight storage's tensors for these elements."""
    moments: Mapping[str, Stored]
    """The states of the update rule, as they are stored."""
    stream: int
    """The key of its random numbers: of its name in the optimizer, else its place there."""
    start: int
    """First element of a slice, in the flat local parameter."""
    amax: Tensor | None = None
    """FP32 (): a bound of the updated magnitudes, where the rule knows one; None: the cast looks for the largest."""


class WeightStore(Protocol):
    """Reads and writes the FP32 value of a parameter."""

    in_place: ClassVar[bool]
    """Whether `read` returns the parameter's memory."""
    whole: ClassVar[bool]
    """Whether `write` needs the whole parameter."""
    keys: ClassVar[tuple[str, ...]]
    """Names of its tensors in the optimizer's state; each has an entry for each element."""

    def prepare(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Makes missing tensors, from the state of another storage."""
        ...

    def follow(self, weight: Tensor, state: Mapping[str, Tensor]) -> Tensor | None:
        """Takes what was written to the weight since the last step; True where nothing was, or None: all follows."""
        ...

    def read(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """FP32 values, in memory that the update may overwrite."""
        ...

    def write(self, pieces: Sequence[Piece], values: Sequence[Tensor]) -> None:
        """Takes the updated values."""
        ...


@dataclass(frozen=True)
class Plain:
    """A parameter that is wide enough to be its own master."""

    in_place: ClassVar[bool] = True
    whole: ClassVar[bool] = False
    keys: ClassVar[tuple[str, ...]] = ()

    def prepare(self, parameter: Tensor, state: dict[str, Any]) -> None:
        _drop_masters(state)

    def follow(self, weight: Tensor, state: Mapping[str, Tensor]) -> None:
        """The weight is all there is."""

    def read(self, pieces: Sequence[Piece]) -> list[Tensor]:
        return [piece.weight for piece in pieces]

    def write(self, pieces: Sequence[Piece], values: Sequence[Tensor]) -> None:
        """Nothing to do: `read` returned the parameter's memory."""


@dataclass(frozen=True)
class Rounded:
    """A 16-bit parameter without a master."""

    stochastic: bool
    in_place: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    keys: ClassVar[tuple[str, ...]] = ()

    def prepare(self, parameter: Tensor, state: dict[str, Any]) -> None:
        _drop_masters(state)

    def follow(self, weight: Tensor, state: Mapping[str, Tensor]) -> None:
        """The weight is all there is."""

    def read(self, pieces: Sequence[Piece]) -> list[Tensor]:
        return [piece.weight.to(torch.float32) for piece in pieces]

    def write(self, pieces: Sequence[Piece], values: Sequence[Tensor]) -> None:
        if self.stochastic:
            values = [_stochastic(value, piece) for value, piece in zip(values, pieces, strict=True)]
        _copy([piece.weight for piece in pieces], values)


@dataclass(frozen=True)
class Mastered:
    """A 16-bit parameter beside an FP32 master."""

    in_place: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    keys: ClassVar[tuple[str, ...]] = ("master",)

    def prepare(self, parameter: Tensor, state: dict[str, Any]) -> None:
        if "master" not in state:
            state["master"] = _value(parameter, state)
            parameter.copy_(state["master"])  # a remainder rounds ties to the other side
        state.pop("remainder", None)

    def follow(self, weight: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        kept = _is_rounded(weight, master := state["master"])
        torch.where(kept, master, weight.to(master.dtype), out=master)
        return kept

    def read(self, pieces: Sequence[Piece]) -> list[Tensor]:
        for piece in pieces:  # each time: a write through `.data` leaves no trace
            if not (piece.weight.is_cpu and _same_bits(piece.weight, piece.state["master"].to(piece.weight.dtype))):
                self.follow(piece.weight, piece.state)
        return [piece.state["master"] for piece in pieces]

    def write(self, pieces: Sequence[Piece], values: Sequence[Tensor]) -> None:
        _copy([piece.weight for piece in pieces], values)


@dataclass(frozen=True)
class Remainder:
    """A BF16 parameter and 16 bits that make it an FP32 master: bits of the master = bits of the weight + remainder.

    The bits of the weight are the upper half of the sum. The remainder is a signed number, so the weight is the master
    rounded to the nearest; between two equally near numbers it is the larger magnitude, because a remainder cannot
    hold a tie in both directions. A number that somebody else writes takes over the remainder of the one before, which
    is at most half its ulp; a zero takes none.
    """

    in_place: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    keys: ClassVar[tuple[str, ...]] = ("remainder",)

    def prepare(self, parameter: Tensor, state: dict[str, Any]) -> None:
        if "remainder" not in state:
            value = _value(parameter, state)
            state["remainder"] = torch.empty_like(parameter, dtype=torch.int16)
            _split(value, parameter, state["remainder"])
        state.pop("master", None)

    def follow(self, weight: Tensor, state: Mapping[str, Tensor]) -> None:
        """The sum rounds to the weight, whatever was written."""

    def read(self, pieces: Sequence[Piece]) -> list[Tensor]:
        return [_joined(piece.weight, piece.state["remainder"]) for piece in pieces]

    def write(self, pieces: Sequence[Piece], values: Sequence[Tensor]) -> None:
        for piece, value in zip(pieces, values, strict=True):
            _split(value, piece.weight, piece.state["remainder"])


@dataclass(frozen=True)
class Quantized:
    """An FP8 weight beside an FP32 master."""

    in_place: ClassVar[bool] = False
    whole: ClassVar[bool] = True
    keys: ClassVar[tuple[str, ...]] = ("master",)

    def prepare(self, parameter: Tensor, state: dict[str, Any]) -> None:
        if "master" not in state:
            state["master"] = _value(parameter, state)
        state.pop("remainder", None)

    def follow(self, weight: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        assert is_quantized_weight(weight)
        own, kept = _numbers(weight), _is_cast(weight, master := state["master"])
        kept &= own == weight.dequantize(torch.float32)
        torch.where(kept, master, own, out=master)
        weight.drop_high_precision()
        return kept

    def read(self, pieces: Sequence[Piece]) -> list[Tensor]:
        return [piece.state["master"] for piece in pieces]

    def write(self, pieces: Sequence[Piece], values: Sequence[Tensor]) -> None:
        for piece, value in zip(pieces, values, strict=True):
            piece.weight.requantize_(value, amax=piece.amax)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class QuantizedRemainder:
    """An FP8 weight and 16 bits more for each element, together a master of some 20 significant bits.

    master = (code + remainder / 2**15 ulp(code)) * scale_inv. A new scale rounds the master to its new grid.
    """

    in_place: ClassVar[bool] = False
    whole: ClassVar[bool] = True
    keys: ClassVar[tuple[str, ...]] = ("remainder",)

    def prepare(self, parameter: Tensor, state: dict[str, Any]) -> None:
        if "remainder" not in state:
            value = _value(parameter, state)
            state["remainder"] = torch.zeros(parameter.shape, dtype=torch.int16, device=parameter.device)
            if "master" in state:
                parameter.requantize_(value)  # type: ignore[attr-defined]
            state["remainder"].copy_(_distance(value, parameter))
        state.pop("master", None)

    def follow(self, weight: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        assert is_quantized_weight(weight)
        value = _restored(weight, state["remainder"])
        kept = _is_cast(weight, value, slack=torch.finfo(weight.dtype).eps)  # it may lie beside a number of that dtype
        state["remainder"].masked_fill_(~kept, 0)
        return kept

    def read(self, pieces: Sequence[Piece]) -> list[Tensor]:
        return [_restored(piece.weight, piece.state["remainder"]) for piece in pieces]

    def write(self, pieces: Sequence[Piece], values: Sequence[Tensor]) -> None:
        for piece, value in zip(pieces, values, strict=True):
            piece.weight.requantize_(value, amax=piece.amax)  # type: ignore[attr-defined]
            piece.state["remainder"].copy_(_distance(value, piece.weight))


def choose(parameter: Tensor, group: Mapping[str, Any]) -> WeightStore:
    """The storage of a parameter under the options of its group.

    Raises:
        ValueError: the options do not go with each other or with the parameter's dtype.
    """
    master, stochastic = group["master"], group["stochastic_rounding"]
    if master not in (None, *get_args(Master)):
        raise ValueError(unknown_name("master", master, get_args(Master)))
    if master and stochastic:
        raise ValueError(
            f"stochastic_rounding is for weights without a master; got master={master!r}: leave one of them out"
        )
    if is_quantized_weight(parameter):
        if master is None:
            raise ValueError(
                "a weight stored only in FP8 loses nearly every update without a master; got master=None: use "
                "master='fp32' or 'remainder'"
            )
        return Quantized() if master == "fp32" else QuantizedRemainder()
    if parameter.itemsize >= 4:
        return Plain()
    if master == "remainder" and parameter.dtype != torch.bfloat16:
        raise ValueError(f"master='remainder' extends bfloat16 weights; got {parameter.dtype}: use master='fp32'")
    if stochastic and parameter.dtype != torch.bfloat16:
        raise ValueError(f"stochastic_rounding rounds bfloat16 weights; got {parameter.dtype}: use master='fp32'")
    return Rounded(stochastic) if master is None else Mastered() if master == "fp32" else Remainder()


def _drop_masters(state: dict[str, Any]) -> None:
    state.pop("master", None)
    state.pop("remainder", None)


def _value(parameter: Tensor, state: Mapping[str, Any]) -> Tensor:
    """The FP32 value of a parameter: of its codes or bits, and of the state of another storage where that agrees."""
    if "remainder" in state and "master" not in state:
        return join(parameter, state["remainder"])
    master: Tensor | None = state.get("master")
    if is_quantized_weight(parameter):
        own, kept = _numbers(parameter), None if master is None else _is_cast(parameter, master)
        parameter.drop_high_precision()
    else:
        own = parameter.detach().to(torch.float32, copy=True)
        kept = None if master is None else _is_rounded(parameter, master)
    return own if master is None or kept is None else torch.where(kept, master, own)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The FP32 master of a BF16 or FP8 weight and its remainder, in memory of its own.

    Example:
        >>> join(torch.tensor([1.0]).bfloat16(), torch.tensor([1], dtype=torch.int16)) == 1 + 2**-23
        tensor([True])
    """
    return _restored(weight, remainder) if is_quantized_weight(weight) else _joined(weight, remainder)


def _ulp(weight: QuantizedWeight) -> Tensor:
    """FP32: distance from each number of the weight to the next larger one of its binade."""
    fmt = weight.spec.format
    codes = decode(weight.codes, fmt).abs_()
    binade = (codes.view(torch.int32) & 0x7F800000).view(torch.float32)
    ulps = binade.mul_(fmt.eps).clamp_(min=fmt.min_subnormal)  # powers of two: numbers of the format, too
    return weight.like(encode_(ulps, fmt), weight.scales).dequantize(torch.float32)


def _restored(weight: Tensor, remainder: Tensor) -> Tensor:
    assert is_quantized_weight(weight)
    return weight.dequantize(torch.float32).addcmul_(remainder.to(torch.float32), _ulp(weight), value=2.0**-15)


def _distance(value: Tensor, weight: Tensor) -> Tensor:
    assert is_quantized_weight(weight)
    steps = (value - weight.dequantize(torch.float32)).div_(_ulp(weight)).mul_(2.0**15)
    return steps.round_().clamp_(-(2**15), 2**15 - 1).nan_to_num_(0.0)  # a NaN is in the code


def _joined(weight: Tensor, remainder: Tensor) -> Tensor:
    bits = weight.view(torch.int16).to(torch.int32) << 16
    value = bits.add_(remainder).view(torch.float32)
    if value.is_cpu and not math.isnan(value.sum()):
        return value
    return torch.where(value.isnan(), weight, value)  # a zero that was written over a negative remainder


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether contiguous 16-bit tensors on a CPU have the same bits; four at a time, torch is six times as fast."""
    fits = one.is_contiguous() and one.storage_offset() % 4 == 0 and one.numel() % 4 == 0
    if not fits or not other.is_contiguous():
        return torch.equal(one, other)
    return torch.equal(one.view(-1).view(torch.int64), other.view(-1).view(torch.int64))


def _is_rounded(weight: Tensor, master: Tensor) -> Tensor:
    """Where a 16-bit weight is its master, rounded to the nearest."""
    return weight == master.to(weight.dtype)


def _is_cast(weight: QuantizedWeight, values: Tensor, slack: float = 0.0) -> Tensor:
    """Where the codes are the cast of FP32 numbers under the scales of the weight.

    slack: a share of each number that may decide a tie. The factor of the cast is 1 / scale_inv to 2**-22 only, unless
        it is a power of two.
    """
    fmt, slack = weight.spec.format, max(slack, 2.0**-22 * (weight.spec.scale_format in ("fp32", "e4m3")))
    size, own = weight.spec.granularity, decode(weight.codes, fmt)
    scales = weight.like(encode_(torch.ones_like(own), fmt), weight.scales).dequantize(torch.float32)
    scaled = values.to(weight.dtype).to(torch.float32) / scales
    below, above = (decode(encode_(scaled * (1 + side), fmt), fmt) for side in (-slack, slack))
    matrices = own if own.dim() == 3 else own[None]
    filled = [size.expand(amax(one, size), tuple(one.shape)) != 0 for one in matrices]
    beyond = _BEYOND.get(weight.spec.scale_format, 1.0) * (1 + slack)
    same = ((below == own) | (above == own)) & (scaled.abs() <= fmt.max * beyond)
    # a block of zeros has scale 1, which says nothing about other numbers
    return (same.view(matrices.shape) & torch.stack(filled)).view(own.shape)


def _numbers(weight: QuantizedWeight) -> Tensor:
    """FP32, new memory: those before the cast where they are known and the codes are still theirs; else the codes'."""
    decoded, exact = weight.dequantize(torch.float32), weight.high_precision
    if exact is None:
        return decoded
    exact = exact.to(weight.device, torch.float32)
    return torch.where(_is_cast(weight, exact), exact, decoded)


def _split(value: Tensor, weight: Tensor, remainder: Tensor) -> None:
    bits = torch.where(value.isnan(), 0x7FC00000, value.view(torch.int32))  # the sum below would wrap with some NaNs
    upper = (bits + 0x8000) >> 16
    weight.view(torch.int16).copy_(upper)
    remainder.copy_(bits - (upper << 16))


def _stochastic(value: Tensor, piece: Piece) -> Tensor:
    """FP32 numbers that BF16 holds: up with the probability of the distance from the lower neighbour, in 2**-16 steps.

    The random bits depend on the step, on the parameter and on the element's place in the whole parameter, and on
    nothing else: not on a generator or on other ranks, so that replicas and shards round as one process does, and a
    resumed run needs no state.
    """
    seed = ((piece.step.to(torch.int64) << 32) + piece.stream).to(value.device)
    words = _words(seed, piece, value.numel()).view(value.shape)
    rounded = ((value.view(torch.int32) + (words >> 16).to(torch.int32)) & -0x10000).view(torch.float32)
    return torch.where(value.isfinite(), rounded, value)


def _words(seed: Tensor, piece: Piece, count: int) -> Tensor:
    """Random bits of the elements of a piece, by their places in the whole parameter."""
    if not hasattr(piece.parameter, "to_local"):
        return random_bits(seed, count, piece.start)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole: Any = piece.parameter
    size, offset = compute_local_shape_and_global_offset(whole.shape, whole.device_mesh, whole.placements)
    if not any(offset[1:]) and tuple(size[1:]) == tuple(whole.shape[1:]):  # whole rows lie one after the other
        return random_bits(seed, count, (offset[0] if offset else 0) * math.prod(whole.shape[1:]) + piece.start)
    places = torch.zeros((), dtype=torch.int64, device=seed.device)
    for first, own, length in zip(offset, size, whole.shape, strict=True):
        places = places[..., None] * length + torch.arange(first, first + own, device=seed.device)
    return random_bits_at(seed, places.reshape(-1)[piece.start : piece.start + count])


def _copy(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(weights), list(values))
