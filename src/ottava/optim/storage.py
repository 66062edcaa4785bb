"""How an optimizer keeps one number for each element of a parameter: FP32, BF16, FP8 or int8.

Each storage turns FP32 numbers into named tensors and back. It knows one fact about a state: whether it is positive,
like the second moment of AdamW, a denominator. There a nonzero number never becomes zero, because the quotient would
explode.

    fp32   4 bytes an element
    bf16   2 bytes
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
from typing import ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ottava.numerics.formats import E4M3
from ottava.numerics.rounding import decode, encode_

Moments = Literal["fp32", "bf16", "fp8", "int8"]
"""Names of the storages."""

Stored = dict[str, Tensor]
"""The tensors of one state in a storage: the tensor "" has an entry for each element, others one for each group."""

_OCTAVES = 16 * math.log(E4M3.max**2 / 2, 2)
_SMALLEST = 2.0**-126  # a smaller magnitude becomes zero: fp32's subnormal numbers have lost bits already


class Storage(Protocol):
    """Keeps FP32 numbers in fewer bytes."""

    groups: ClassVar[Mapping[str, int]]
    """Name of a stored tensor -> elements of the parameter for each of its entries."""

    def empty(self, like: Tensor) -> Stored:
        """Zeros for a contiguous parameter."""
        ...

    def read(self, stored: Sequence[Stored], *, positive: bool) -> list[Tensor]:
        """The FP32 numbers of several states, flat: in new memory, or the stored memory itself."""
        ...

    def write(self, stored: Sequence[Stored], values: Sequence[Tensor], *, positive: bool, keep: bool = False) -> None:
        """Stores FP32 numbers, which it may overwrite; keep: with the present scales."""
        ...


@dataclass(frozen=True)
class Wide:
    """Each number in a dtype of torch."""

    groups: ClassVar[Mapping[str, int]] = MappingProxyType({"": 1})
    dtype: torch.dtype

    def empty(self, like: Tensor) -> Stored:
        """Zeros in this dtype, or in the parameter's if that is wider."""
        dtype = torch.promote_types(self.dtype, like.dtype) if self.dtype == torch.float32 else self.dtype
        return {"": torch.zeros_like(like, dtype=dtype)}

    def read(self, stored: Sequence[Stored], *, positive: bool) -> list[Tensor]:
        """The stored memory itself if it is wide enough."""
        return [one[""] if one[""].itemsize >= 4 else one[""].to(torch.float32) for one in stored]

    def write(self, stored: Sequence[Stored], values: Sequence[Tensor], *, positive: bool, keep: bool = False) -> None:
        """Rounds to the nearest."""
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


STORAGES: Mapping[str, Storage] = MappingProxyType(
    {"fp32": Wide(torch.float32), "bf16": Wide(torch.bfloat16), "fp8": Expanded(), "int8": Linear()}
)
"""Every storage by its name in `moments`."""
