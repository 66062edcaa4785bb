"""How an optimizer keeps one number for each element of a parameter: FP32, BF16, FP16, FP8 or int8.

Each storage turns FP32 numbers into named tensors and back. It knows one fact about a state: whether it is positive,
like the second moment of AdamW, a denominator. There a nonzero number never becomes zero, because the quotient would
explode.

    fp32   4 bytes an element
    bf16   2 bytes
    fp16   2 bytes, and 4 bytes for a block of 2048: its largest magnitude becomes FP16's
    fp8    1 byte, and 5 bytes for a group of 128: COAT's dynamic range expansion, which raises the magnitudes of a
           group to a power before the cast, so that they fill E4M3
    int8   1 byte, and 4 bytes for a block of 2048: steps of the block's largest magnitude

An infinity or NaN becomes NaN, for its element only, as torch's FP32 states keep it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ottava.base.errors import need_known
from ottava.numerics.formats import E4M3
from ottava.numerics.rounding import decode, encode_, random_bits, random_bits_at
from ottava.numerics.scaling import amax
from ottava.weights.parameter import QuantizedWeight, is_quantized_weight

Moments = Literal["fp32", "bf16", "fp16", "fp8", "int8"]
"""Names of the storages."""

Stored = dict[str, Tensor]
"""The tensors of one state in a storage: the tensor "" has an entry for each element, others one for each group."""

_OCTAVES = 16 * math.log(E4M3.max**2 / 2, 2)
_SMALLEST = 2.0**-126  # a smaller magnitude becomes zero: fp32's subnormal numbers have lost bits already


@dataclass(frozen=True)
class Wide:
    """Each number in a dtype of torch."""

    groups: ClassVar[Mapping[str, int]] = MappingProxyType({"": 1})
    """Name of a stored tensor -> elements of the parameter for each of its entries."""
    dtype: torch.dtype

    def empty(self, like: Tensor) -> Stored:
        """Zeros for a contiguous parameter: in this dtype, or in the parameter's if that is wider."""
        dtype = torch.promote_types(self.dtype, like.dtype) if self.dtype == torch.float32 else self.dtype
        return {"": torch.zeros_like(like, dtype=dtype)}

    def read(self, stored: Sequence[Stored], *, positive: bool) -> list[Tensor]:
        """The FP32 numbers of several states, flat: the stored memory itself if it is wide enough."""
        return [one[""] if one[""].itemsize >= 4 else one[""].to(torch.float32) for one in stored]

    def write(self, stored: Sequence[Stored], values: Sequence[Tensor], *, positive: bool, keep: bool = False) -> None:
        """Stores FP32 numbers, which it may overwrite; keep: with the present scales."""
        pairs = [(one[""], value) for one, value in zip(stored, values, strict=True) if one[""] is not value]
        if pairs:
            torch._foreach_copy_([stored for stored, _ in pairs], [value for _, value in pairs])


@dataclass(frozen=True)
class Grouped:
    """Storages with a scale for each group of elements; a call casts all groups at once."""

    groups: ClassVar[Mapping[str, int]]
    dtypes: ClassVar[Mapping[str, torch.dtype]]
    size: ClassVar[int]

    def empty(self, like: Tensor) -> Stored:
        """Zeros, in groups along the flat parameter; the last group may be shorter."""
        count = -(-like.numel() // self.size)
        shapes = {name: like.shape if every == 1 else (count,) for name, every in self.groups.items()}
        return {name: torch.zeros(shape, dtype=self.dtypes[name], device=like.device) for name, shape in shapes.items()}

    def read(self, stored: Sequence[Stored], *, positive: bool) -> list[Tensor]:
        """Decoded numbers, flat."""
        rows = {name: self._rows([one[name] for one in stored], every) for name, every in self.groups.items()}
        return self._split(self._decode(rows, positive), [one[""].numel() for one in stored])

    def write(self, stored: Sequence[Stored], values: Sequence[Tensor], *, positive: bool, keep: bool = False) -> None:
        """Casts all groups at once."""
        wide = self._rows(values, 1)
        given = {name: self._rows([one[name] for one in stored], every) for name, every in self.groups.items() if name}
        for name, rows in self._encode(wide, positive, given if keep else None).items():
            sizes = [one[name].numel() for one in stored]
            parts = self._split(rows, sizes) if self.groups[name] == 1 else rows.view(-1).split(sizes)
            for one, part in zip(stored, parts, strict=True):
                one[name].view(-1).copy_(part)

    def _rows(self, flats: Sequence[Tensor], every: int) -> Tensor:
        """(groups, size): elements of several tensors, each padded to whole groups; (groups, 1): their scales."""
        if every > 1:
            return torch.cat([flat.view(-1) for flat in flats])[:, None]
        flats = [flat.reshape(-1) for flat in flats]
        bits = [flat.view(torch.uint8) if flat.itemsize == 1 else flat for flat in flats]  # torch.cat knows no FP8
        whole = torch.cat([F.pad(flat, (0, -flat.numel() % self.size)) for flat in bits])
        return whole.view(flats[0].dtype).view(-1, self.size)

    def _split(self, rows: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """The inverse of `_rows`."""
        flats = rows.view(-1).split([-(-size // self.size) * self.size for size in sizes])
        return [flat[:size] for flat, size in zip(flats, sizes, strict=True)]

    def _decode(self, stored: Mapping[str, Tensor], positive: bool) -> Tensor:
        raise NotImplementedError

    def _encode(self, x: Tensor, positive: bool, given: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        raise NotImplementedError


@dataclass(frozen=True)
class Expanded(Grouped):
    """E4M3 with dynamic range expansion: the code of sign(x) (|x| / center) ** exponent.

    A group of 128 has center = sqrt(smallest * largest magnitude), without zeros, and as exponent
    floor(16 log2(448 ** 2 / 2) / log2(largest / smallest)) / 16, from 1/16 to 255/16, kept in 16ths. So the magnitudes
    reach from 1 / 317 to 317, whatever their ratio was, and none of them becomes zero.

    Source: COAT (Xi et al., ICLR 2025, arXiv 2410.19313). Its kernel gives infinity and NaN for a group of equal
    numbers; here the exponent ends at 255/16, and a group of zeros has center 0.
    """

    size = 128
    groups: ClassVar[Mapping[str, int]] = MappingProxyType({"": 1, "_center": 128, "_exponent": 128})
    dtypes = MappingProxyType({"": torch.float8_e4m3fn, "_center": torch.float32, "_exponent": torch.uint8})

    def _decode(self, stored: Mapping[str, Tensor], positive: bool) -> Tensor:
        codes = decode(stored[""], E4M3)
        root = 16.0 / stored["_exponent"].clamp(min=1).to(torch.float32)
        magnitude = codes.abs().pow_(root).mul_(stored["_center"])  # NaN stays, and 0 ** root is 0
        return torch.copysign(magnitude, codes, out=magnitude)

    def _encode(self, x: Tensor, positive: bool, given: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        magnitude = x.abs()
        finite = magnitude < math.inf
        kept = finite & (magnitude >= _SMALLEST)
        if given is None:
            largest = torch.where(kept, magnitude, 0.0).amax(1, keepdim=True)
            smallest = torch.where(kept, magnitude, math.inf).amin(1, keepdim=True).minimum(largest)
            octaves = (largest / smallest).log2()  # NaN for a group of zeros, infinity from 2**128 on
            exponent = (_OCTAVES / octaves).nan_to_num(255.0).floor_().clamp_(1, 255).to(torch.uint8)
            center = smallest.sqrt() * largest.sqrt()
        else:
            center, exponent = given["_center"], given["_exponent"].clamp(min=1)
        magnitude.div_(center.clamp(min=_SMALLEST)).pow_(exponent.to(torch.float32) / 16)
        magnitude = torch.where(
            kept, magnitude.clamp_(E4M3.min_subnormal, E4M3.max), torch.where(finite, 0.0, math.nan)
        )
        return {"": encode_(torch.copysign(magnitude, x), E4M3), "_center": center, "_exponent": exponent}


@dataclass(frozen=True)
class Linear(Grouped):
    """Whole numbers times a step for each block of 2048: the largest magnitude is code 127, and -128 stands for NaN.

    A positive state is kept as its square root, in codes from 0 to 254; the smallest of a number above zero is 1, and
    255 stands for NaN.

    Source: the 8-bit momentum of Muon (arXiv 2509.23106).
    """

    size = 2048
    groups: ClassVar[Mapping[str, int]] = MappingProxyType({"": 1, "_amax": 2048})
    dtypes = MappingProxyType({"": torch.int8, "_amax": torch.float32})

    def _decode(self, stored: Mapping[str, Tensor], positive: bool) -> Tensor:
        codes = stored[""].view(torch.uint8) if positive else stored[""]
        top, nan = (254.0, 255) if positive else (127.0, -128)
        x = codes.to(torch.float32).mul_(stored["_amax"] / top)
        x = x.square_() if positive else x
        return x.masked_fill_(codes == nan, math.nan)

    def _encode(self, x: Tensor, positive: bool, given: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        root = x.sqrt() if positive else x
        finite = root.abs() < math.inf
        usable = torch.where(finite, root, 0.0)
        amax = usable.abs().amax(1, keepdim=True) if given is None else given["_amax"]
        top, nan = (254.0, 255.0) if positive else (127.0, -128.0)
        step = torch.where(amax > _SMALLEST, amax, torch.inf) / top  # a block of zeros has codes 0
        codes = (usable / step).round_().clamp_(-top, top)
        if positive:
            codes = torch.where((usable > 0) & (step < math.inf), codes.clamp(min=1), codes)
        codes = torch.where(finite, codes, nan)
        stored = codes.to(torch.uint8).view(torch.int8) if positive else codes.to(torch.int8)
        return {"": stored, "_amax": amax}


@dataclass(frozen=True)
class Half(Grouped):
    """FP16 times a scale for each block of 2048, so that small moments keep their bits.

    Source: TransformerEngine's FusedAdam, which has one scale a tensor.
    """

    size = 2048
    groups: ClassVar[Mapping[str, int]] = MappingProxyType({"": 1, "_unit": 2048})
    dtypes = MappingProxyType({"": torch.float16, "_unit": torch.float32})

    def _decode(self, stored: Mapping[str, Tensor], positive: bool) -> Tensor:
        return stored[""].to(torch.float32).mul_(stored["_unit"])

    def _encode(self, x: Tensor, positive: bool, given: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        top, finite = torch.finfo(torch.float16).max, x.abs() < math.inf
        usable = torch.where(finite, x, 0.0)
        unit = usable.abs().amax(1, keepdim=True) / top if given is None else given["_unit"]
        unit = unit.clamp(min=_SMALLEST)
        codes = (usable / unit).clamp_(-top, top)
        codes = torch.where(usable > 0, codes.clamp(min=2.0**-24), codes) if positive else codes
        return {"": torch.where(finite, codes, math.nan).to(torch.float16), "_unit": unit}


Storage = Wide | Grouped
STORAGES: Mapping[str, Storage] = MappingProxyType(
    {"fp32": Wide(torch.float32), "bf16": Wide(torch.bfloat16), "fp16": Half(), "fp8": Expanded(), "int8": Linear()}
)
"""Every storage by its name in `moments`."""


# --- weights: how an optimizer reads a parameter in FP32, and writes it back ---

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
    """Reads and writes the FP32 value of a parameter; this one keeps nothing beside the weight."""

    in_place: ClassVar[bool] = False
    """Whether `read` returns the parameter's memory."""
    whole: ClassVar[bool] = False
    """Whether `write` needs the whole parameter."""
    keys: ClassVar[tuple[str, ...]] = ()
    """Names of its tensors in the optimizer's state; each has an entry for each element."""

    def prepare(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Makes missing tensors, from the state of another storage."""
        state.pop("master", None)
        state.pop("remainder", None)

    def follow(self, weight: Tensor, state: Mapping[str, Tensor]) -> Tensor | None:
        """Takes what was written to the weight since the last step; True where nothing was, or None: all follows."""
        return None

    def read(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """FP32 values, in memory that the update may overwrite."""
        raise NotImplementedError(f"{type(self).__name__}.read")

    def write(self, pieces: Sequence[Piece], values: Sequence[Tensor]) -> None:
        """Takes the updated values."""
        torch._foreach_copy_([piece.weight for piece in pieces], list(values))


@dataclass(frozen=True)
class Plain(WeightStore):
    """A parameter that is wide enough to be its own master."""

    in_place: ClassVar[bool] = True

    def read(self, pieces: Sequence[Piece]) -> list[Tensor]:
        return [piece.weight for piece in pieces]

    def write(self, pieces: Sequence[Piece], values: Sequence[Tensor]) -> None:
        """Nothing to do: `read` returned the parameter's memory."""


@dataclass(frozen=True)
class Rounded(WeightStore):
    """A 16-bit parameter without a master."""

    stochastic: bool

    def read(self, pieces: Sequence[Piece]) -> list[Tensor]:
        return [piece.weight.to(torch.float32) for piece in pieces]

    def write(self, pieces: Sequence[Piece], values: Sequence[Tensor]) -> None:
        if self.stochastic:
            values = [_stochastic(value, piece) for value, piece in zip(values, pieces, strict=True)]
        super().write(pieces, values)


@dataclass(frozen=True)
class Mastered(WeightStore):
    """A 16-bit parameter beside an FP32 master."""

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


@dataclass(frozen=True)
class Remainder(WeightStore):
    """A BF16 parameter and 16 bits that make it an FP32 master: bits of the master = bits of the weight + remainder.

    The bits of the weight are the upper half of the sum. The remainder is a signed number, so the weight is the master
    rounded to the nearest; between two equally near numbers it is the larger magnitude, because a remainder cannot
    hold a tie in both directions. Nothing has to `follow`: a number that somebody else writes takes over the remainder
    of the one before, which is at most half its ulp; a zero takes none.
    """

    keys: ClassVar[tuple[str, ...]] = ("remainder",)

    def prepare(self, parameter: Tensor, state: dict[str, Any]) -> None:
        if "remainder" not in state:
            value = _value(parameter, state)
            state["remainder"] = torch.empty_like(parameter, dtype=torch.int16)
            _split(value, parameter, state["remainder"])
        state.pop("master", None)

    def read(self, pieces: Sequence[Piece]) -> list[Tensor]:
        return [join(piece.weight, piece.state["remainder"]) for piece in pieces]

    def write(self, pieces: Sequence[Piece], values: Sequence[Tensor]) -> None:
        for piece, value in zip(pieces, values, strict=True):
            _split(value, piece.weight, piece.state["remainder"])


@dataclass(frozen=True)
class Quantized(WeightStore):
    """An FP8 weight beside an FP32 master."""

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
class QuantizedRemainder(Remainder):
    """An FP8 weight and 16 bits more for each element, together a master of some 20 significant bits.

    master = (code + remainder / 2**15 ulp(code)) * scale_inv. A new scale rounds the master to its new grid.
    """

    whole: ClassVar[bool] = True

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
    need_known("", "master", master, (None, *get_args(Master)))
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
    if hasattr(parameter, "is_cast_of"):  # codes in a tensor of another kind
        if master != "fp32":
            raise ValueError(f"a quantized tensor keeps its master in FP32; got master={master!r}: use master='fp32'")
        return Mastered()
    if parameter.itemsize >= 4:
        return Plain()
    if master == "remainder" and parameter.dtype != torch.bfloat16:
        raise ValueError(f"master='remainder' extends bfloat16 weights; got {parameter.dtype}: use master='fp32'")
    if stochastic and parameter.dtype != torch.bfloat16:
        raise ValueError(f"stochastic_rounding rounds bfloat16 weights; got {parameter.dtype}: use master='fp32'")
    return Rounded(stochastic) if master is None else Mastered() if master == "fp32" else Remainder()


def _value(parameter: Tensor, state: Mapping[str, Any]) -> Tensor:
    """The FP32 value of a parameter: of its codes or bits, and of the state of another storage where that agrees."""
    if "remainder" in state and "master" not in state:
        return join(parameter, state["remainder"])
    master: Tensor | None = state.get("master")
    if is_quantized_weight(parameter):
        own, kept = _numbers(parameter), None if master is None else _is_cast(parameter, master)
        parameter.drop_high_precision()
    else:
        plain = parameter.detach()
        plain = plain.dequantize() if hasattr(plain, "is_cast_of") else plain
        own = plain.to(torch.float32, copy=True)
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
    """Where a 16-bit weight is its master, rounded to the nearest, or by a cast of its own."""
    if hasattr(weight, "is_cast_of"):
        return weight.is_cast_of(master)  # type: ignore[no-any-return]
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
