"""The settings of a cast (`QuantizationSpec`) and its result (`QuantizedTensor`): two plain frozen containers.

There is no tensor subclass and no dispatch. Code that takes an FP8 operand for a tensor raises an error, and nothing
dequantizes silently. The path through a Linear stays short (torchao's subclass takes 113 calls, a container 8). `ops`
holds the casts and GEMMs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ottava.base.errors import RefusesUnknownFields, need_known, need_type, unknown_name
from ottava.numerics.accumulator import Accumulator, get_accumulator
from ottava.numerics.formats import E2M1, E5M2, Format, get_format
from ottava.numerics.rounding import Rounding, decode
from ottava.numerics.scaling import (
    BLOCK_128X128,
    BLOCK_SCALES,
    PER_TENSOR,
    Granularity,
    Scale,
    ScaleFormat,
    compute_scale,
    read_scales,
)
from ottava.numerics.transforms import Transform, get_transform

Scaling = Literal["current", "delayed", "guarded"]
AmaxAlgorithm = Literal["max", "most_recent"]
AmaxFunction = Callable[[Tensor], Tensor]
"""Window of amaxes, newest first, (amax_history_len,) -> the amax of the next scale, (); empty entries are 0."""

_CHOICES: tuple[tuple[str, Any], ...] = (
    ("scale_format", ScaleFormat),
    ("scaling", Scaling),
    ("rounding", Rounding),
)
# these fields decide the next scale, not the cast with it, so `key` leaves them out
_HISTORY_FIELDS = ("amax_history_len", "amax_compute_algo", "bootstrap")
_TYPES: tuple[tuple[str, type], ...] = (
    ("format", Format),
    ("granularity", Granularity),
    ("margin", int),
    ("amax_history_len", int),
    ("guard_bits", int),
    ("bootstrap", bool),
    ("block_scale", str),
)
_MAX_MARGIN, _MAX_HISTORY = 126, 1 << 20  # the octaves of an fp32 scale; TransformerEngine's default is 1024


@dataclass(frozen=True)
class QuantizationSpec(RefusesUnknownFields):
    """The cast of one operand of one GEMM: one cell of a recipe. Frozen, hashable, compared by every field.

    Raises:
        TypeError: unknown field, or a value of another type.
        ValueError: an unknown value, or a combination without a meaning.

    Example:
        >>> from ottava.numerics.formats import E4M3
        >>> str(QuantizationSpec(E4M3)), QuantizationSpec(E4M3).scaling
        ('E4M3[tensor]', 'current')
    """

    format: Format
    """Number format of the codes."""
    granularity: Granularity = PER_TENSOR
    """The elements that share a scale."""
    scale_format: ScaleFormat = "fp32"
    """The number format of a scale."""
    scaling: Scaling = "current"
    """"current": from this tensor's own amax. "delayed": predicted from the amaxes of earlier steps. "guarded":
    predicted, but the current scale if the prediction would clip or waste more than `guard_bits` octaves."""
    margin: int = 0
    """Octaves of headroom above amax."""
    amax_history_len: int = 16
    """Delayed: length of the window in optimizer steps. TE's default of 1024 remembers old spikes (TE #1169)."""
    amax_compute_algo: AmaxAlgorithm | AmaxFunction = "max"
    """Delayed: largest amax of the window, the last one, or a function of the window."""
    bootstrap: bool = True
    """Delayed: without a history take the current scale; False starts at scale 1, as TransformerEngine does."""
    guard_bits: int = 3
    """Guarded: octaves below the top of the format in which amax may land before the guard fires."""
    rounding: Rounding = "nearest_even"
    """"stochastic" for gradients in very small formats."""
    transform: Transform | None = None
    """What the tensor becomes before the cast: a `transforms.Transform`, or its kind, or a mapping; None: itself."""
    block_scale: str = "amax"
    """How the scale of a block is chosen: "amax", or a rule of `scaling.BLOCK_SCALES` for NVFP4's blocks."""
    repeatable: bool = field(init=False, repr=False, compare=False)
    """Whether the same tensor always gets the same codes: nothing is drawn, and no other operand has a say."""
    key: str = field(init=False, repr=False, compare=False)
    """The spec as one string, because torch custom operators take no dataclass. A field, because Dynamo cannot trace
    the code that makes it."""
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, wanted in _TYPES:
            need_type(f"QuantizationSpec: {name}", getattr(self, name), wanted)
        if self.transform is not None:
            object.__setattr__(self, "transform", get_transform(self.transform))
        for name, kind in _CHOICES:
            need_known("QuantizationSpec", name, getattr(self, name), get_args(kind))
        if not callable(self.amax_compute_algo) and self.amax_compute_algo not in get_args(AmaxAlgorithm):
            known = (*get_args(AmaxAlgorithm), "or a function")
            raise ValueError(f"QuantizationSpec: {unknown_name('amax_compute_algo', self.amax_compute_algo, known)}")
        if not 1 <= self.amax_history_len <= _MAX_HISTORY:
            raise ValueError(
                f"QuantizationSpec: amax_history_len is {self.amax_history_len}; needs 1 or more steps, at most "
                f"{_MAX_HISTORY:,}"
            )
        if abs(self.margin) > _MAX_MARGIN:
            raise ValueError(
                f"QuantizationSpec: margin is {self.margin}; needs -{_MAX_MARGIN} to {_MAX_MARGIN} octaves"
            )
        if not 1 <= self.guard_bits <= _MAX_MARGIN:
            raise ValueError(f"QuantizationSpec: guard_bits is {self.guard_bits}; needs 1 or more octaves")
        if self.predicted and (self.granularity != PER_TENSOR or self.scale_format not in ("fp32", "pow2")):
            raise ValueError(
                f"QuantizationSpec: {self.scaling} scaling predicts one fp32 or pow2 scale for a whole tensor; got "
                f"granularity {self.granularity}, scales {self.scale_format}. Use scaling='current' for rows and blocks"
            )
        if self.scale_format == "e4m3" and self.granularity == PER_TENSOR:
            raise ValueError(
                "QuantizationSpec: scale_format 'e4m3' needs a scale for each block: give a block granularity"
            )
        self._refuse_rules()
        repeatable = self.rounding == "nearest_even" and self.transform is None and self.block_scale != "ms_eden"
        object.__setattr__(self, "repeatable", repeatable)
        settings = {name: value for name, value in self.to_dict().items() if name not in _HISTORY_FIELDS}
        object.__setattr__(self, "key", json.dumps(settings, sort_keys=True))
        compared = tuple(getattr(self, f.name) for f in fields(self) if f.compare)
        object.__setattr__(self, "_hash", hash(compared))

    def _refuse_rules(self) -> None:
        """Refuses transforms and rules for block scales where they have no meaning."""
        if self.transform is not None and self.predicted:
            raise ValueError(
                f"QuantizationSpec: {self.scaling} scaling with transform {self.transform}: a history holds amaxes of "
                "the tensor, not of what it becomes. Use scaling='current'"
            )
        if self.block_scale == "amax":
            return
        need_known("QuantizationSpec", "block_scale", self.block_scale, ("amax", *BLOCK_SCALES))
        if self.format != E2M1 or self.scale_format != "e4m3" or self.margin:
            raise ValueError(
                f"QuantizationSpec: block_scale {self.block_scale!r} is for E2M1 with scale_format 'e4m3' and margin "
                f"0; got {self.format}, {self.scale_format!r}, margin {self.margin}"
            )
        group, cols = None if self.transform is None else self.transform.group, self.granularity.cols
        if self.block_scale == "ms_eden" and not (group and cols and group % cols == 0 and self.granularity.rows == 1):
            raise ValueError(
                "QuantizationSpec: block_scale 'ms_eden' is unbiased behind a random rotation only: give "
                "transform={'kind': 'hadamard', 'size': 128, 'signs': 'fresh', 'rounded': False} and blocks of one row "
                f"that divide its size; got transform {self.transform}, granularity {self.granularity}"
            )

    def __hash__(self) -> int:
        return self._hash  # kernels look up settings by spec

    @property
    def predicted(self) -> bool:
        """Whether the scale comes from a history of earlier steps; then a door keeps state."""
        return self.scaling != "current"

    @functools.cached_property
    def transposed(self) -> QuantizationSpec:
        """The same blocks as seen from the transpose."""
        return replace(self, granularity=self.granularity.transposed)

    def scale_of(self, amax: Tensor) -> Scale:
        """The scale that brings an amax to the top of the format, see `scaling.compute_scale`."""
        return compute_scale(amax, self.format, scale_format=self.scale_format, margin=self.margin)

    def from_window(self, history: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(scale, whether it is usable) of a window of amaxes (..., steps), newest first, empty entries 0: both (...).

        before: the scales so far (...), for an amax_compute_algo that makes scales, too; 0, None: none.

        Example:
            >>> from ottava.numerics.formats import E4M3
            >>> QuantizationSpec(E4M3, scaling="delayed").from_window(torch.tensor([[7.0, 448.0], [0.0, 0.0]]))
            (tensor([1., 1.]), tensor([ True, False]))
        """
        algorithm = self.amax_compute_algo
        if callable(algorithm):  # a user's function of one window
            rows = history.reshape(-1, history.shape[-1])
            amax = torch.stack([algorithm(row) for row in rows]).reshape(history.shape[:-1])
        else:
            amax = history.amax(dim=-1) if algorithm == "max" else history[..., 0]
        rule, own = getattr(algorithm, "scale_of", None), torch.zeros_like(amax) if before is None else before
        scale = self.scale_of(amax).scale if rule is None else rule(amax, own, self)
        return scale, (amax > 0) & amax.isfinite()

    def __str__(self) -> str:
        return self._name

    @functools.cached_property
    def _name(self) -> str:  # cached: the record of every GEMM holds it
        extras: list[str] = [self.scale_format] if self.scale_format != "fp32" else []
        extras += [self.scaling] if self.predicted else []
        extras += ["stochastic"] if self.rounding == "stochastic" else []
        extras += [self.block_scale] if self.block_scale != "amax" else []
        extras += [str(self.transform)] if self.transform is not None else []
        return f"{self.format.name}[{', '.join([str(self.granularity), *extras])}]"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON and YAML values, without fields at their default.

        A function as amax_compute_algo becomes "module:name", for the record only; `from_dict` does not import it.
        """
        settings = [f for f in fields(self) if f.init]
        kept = {f.name: getattr(self, f.name) for f in settings if getattr(self, f.name) != f.default}
        kept["format"] = self.format.name
        if "granularity" in kept:
            kept["granularity"] = str(self.granularity)
        if self.transform is not None:
            kept["transform"] = self.transform.to_dict()
        if callable(self.amax_compute_algo):
            kept["amax_compute_algo"] = f"{self.amax_compute_algo.__module__}:{self.amax_compute_algo.__qualname__}"
        return kept

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QuantizationSpec:
        """The inverse of `to_dict`; errors on unknown keys and names give the nearest known one."""
        need_type("QuantizationSpec", values, Mapping)
        values = dict(values)
        if "format" not in values:
            raise ValueError(f"QuantizationSpec: 'format' is missing from {values}; give one such as 'E4M3'")
        values["format"] = get_format(values["format"])
        if not isinstance(values.get("granularity", PER_TENSOR), Granularity):
            values["granularity"] = Granularity.parse(str(values["granularity"]))
        if ":" in str(values.get("amax_compute_algo", "")):
            raise ValueError(
                f"QuantizationSpec: amax_compute_algo {values['amax_compute_algo']!r} names a function; build the "
                "recipe in Python and pass the function itself"
            )
        return cls(**values)


@functools.lru_cache(maxsize=256)
def spec_from_key(key: str) -> QuantizationSpec:
    """The spec of `QuantizationSpec.key`."""
    return QuantizationSpec.from_dict(json.loads(key))


def refuse_pair(
    lhs: QuantizationSpec | None, rhs: QuantizationSpec | None, accumulator: Accumulator | None = None
) -> str | None:
    """Why no GEMM takes these two operands together, on any device; None if one does.

    A CPU follows the rules of the hardware, too, so a run that works here also works there. That E5M2 x E5M2 and two
    widths are missing is a rule of cuBLASLt, not of the instructions: they run under a named accumulator that takes
    them, which is emulated.
    Source: cuBLASLt's table of FP8 operand types; torch ScaledBlas.cpp (128x128 with 128x128 is not offered); the
    operands of tcgen05.mma in the PTX ISA.
    """
    if lhs is None and rhs is None:
        return None
    if lhs is None or rhs is None:
        return "one operand is quantized and the other is not; quantize both or neither"
    if lhs.format == E5M2 and rhs.format == E5M2 and accumulator is None:
        return "no tensor core multiplies E5M2 by E5M2; make one of them E4M3"
    if (lhs.format.specials == "fnuz") != (rhs.format.specials == "fnuz"):
        return f"{lhs.format} meets {rhs.format}; no card multiplies AMD's FNUZ formats by OCP's"
    if lhs.granularity == BLOCK_128X128 and rhs.granularity == BLOCK_128X128:
        return "no tensor core takes 128x128 blocks on both sides; make one of them 1x128"
    if lhs.format.bits != rhs.format.bits and not (accumulator is not None and accumulator.scales_blocks):
        return f"{lhs.format} has {lhs.format.bits} bits and {rhs.format} {rhs.format.bits}; both sides need one width"
    if accumulator is not None and (reason := refuse_instruction(lhs, rhs, accumulator)):
        return reason
    one, other = (t if t is not None and t.paired else None for t in (lhs.transform, rhs.transform))
    if one != other:
        return f"transform {one} meets {other}; a product keeps its value only if both sides have the same one"
    return None


def instruction(lhs: QuantizationSpec, rhs: QuantizationSpec, accumulator: Accumulator) -> tuple[Accumulator, bool]:
    """The profile of the instruction for two operands, and whether it scales their blocks.

    Example:
        >>> from ottava.numerics.accumulator import get_accumulator
        >>> from ottava.numerics.formats import E4M3
        >>> from ottava.numerics.scaling import BLOCK_1X32
        >>> mxfp8, mxfp4 = (QuantizationSpec(fmt, BLOCK_1X32, "e8m0") for fmt in (E4M3, E2M1))
        >>> for pair in ((mxfp8, mxfp8), (mxfp8, mxfp4), (mxfp4, mxfp4)):
        ...     instruction(*pair, get_accumulator("tcgen05"))[0].name
        'tcgen05'
        'tcgen05'
        'tcgen05_fp4'
    """
    scaled = accumulator.scales_blocks and {_instruction_scale(lhs), _instruction_scale(rhs)} != {None}
    if scaled and accumulator.fp4 and lhs.format == rhs.format == E2M1:
        accumulator = get_accumulator(accumulator.fp4)
    return accumulator, scaled


def _instruction_scale(spec: QuantizationSpec) -> str | None:
    """The scales of blocks that instructions of Blackwell read; None: fp32 numbers, which stand outside."""
    return {"e8m0": "E8M0", "e8m0_floor": "E8M0", "e4m3": "E4M3"}.get(spec.scale_format)


def refuse_instruction(lhs: QuantizationSpec, rhs: QuantizationSpec, accumulator: Accumulator) -> str | None:
    """Why the instruction of a profile does not take two operands; None if it does."""
    profile, scaled = instruction(lhs, rhs, accumulator)
    name, fp4 = f"accumulator {accumulator.name!r}", lhs.format == rhs.format == E2M1
    if profile.dot > 1 and not (fp4 and scaled):
        return f"{name} is that of an instruction on E2M1 x E2M1 in blocks with E8M0 or E4M3 scales"
    if not scaled:
        return None
    scales = {_instruction_scale(lhs), _instruction_scale(rhs)}
    step = profile.dot if profile.dot > 1 else profile.group or 1
    ragged = any(spec.granularity.cols is not None and spec.granularity.cols % step for spec in (lhs, rhs))
    if len(scales) > 1 or ragged or ("E4M3" in scales and profile.dot == 1):
        return (
            f"{name} scales blocks of {step} columns, or of multiples, by E8M0 on both sides"
            f"{', or by E4M3 on both sides' if fp4 else '; by E4M3 only E2M1 x E2M1'}"
        )
    return None


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Codes and their scales: x ~= decode(data) * scale_inv, block by block.

    Example: see `ottava.quantize`.
    """

    data: Tensor
    """Codes (R, C) in spec.format.storage_dtype."""
    scale_inv: Tensor
    """fp32, one entry per block: spec.granularity.grid_shape((R, C)). E8M0's bytes where a weight that is stored so is
    decoded when it is read."""
    spec: QuantizationSpec
    """The settings of the cast."""
    dtype: torch.dtype
    """Of the original tensor."""
    amax: Tensor | None = None
    """The amaxes of the blocks, fp32, in any order, for watches; None: not kept, as in backward."""
    aside: Tensor | None = None
    """What `spec.transform` took from the tensor: means, factors or a seed. The codes are those of what it made."""

    @property
    def shape(self) -> torch.Size:
        """(R, C)."""
        return self.data.shape

    @property
    def device(self) -> torch.device:
        """The device of codes and scales."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and `aside` in memory: E8M0 and E4M3 scales take fp32, each 4-bit code takes
        a byte."""
        return self.data.nbytes + self.scale_inv.nbytes + (0 if self.aside is None else self.aside.nbytes)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """decode(data) * scale_inv in fp32, rounded once to `dtype` (that of the original by default).

        Under a transform these are the numbers of the transformed tensor, which `transformed` gives before the cast.

        Example:
            >>> import ottava
            >>> ottava.quantize(torch.tensor([[1.0, 2.0]]), ottava.QuantizationSpec(ottava.E4M3)).dequantize()
            tensor([[1., 2.]])
        """
        numbers, scale_inv = decode(self.data, self.spec.format), self.scale_inv
        if scale_inv.dtype == torch.uint8:
            scale_inv = read_scales(scale_inv)
        return self.spec.granularity.multiply_(numbers, scale_inv).to(dtype or self.dtype)

    def transformed(self, x: Tensor) -> Tensor:
        """What was cast of x: x itself, or what `spec.transform` has made of it.

        Example:
            >>> import ottava
            >>> x, spec = torch.randn(2, 32), ottava.QuantizationSpec(ottava.E4M3, transform="mean")
            >>> bool((ottava.quantize(x, spec).transformed(x).mean(0).abs() < 1e-6).all())
            True
        """
        return x if self.spec.transform is None else self.spec.transform.apply(x, self.aside)

    def magnitudes(self) -> QuantizedTensor:
        """The same codes without their signs: biased numbers, on which short accumulators lose most.

        Example:
            >>> import ottava
            >>> x_q = ottava.quantize(torch.tensor([[1.0, -2.0]]), ottava.QuantizationSpec(ottava.E4M3))
            >>> x_q.magnitudes().dequantize()
            tensor([[1., 2.]])
        """
        kept = (1 << (self.spec.format.bits - 1)) - 1
        return replace(self, data=self.data.view(torch.uint8).bitwise_and(kept).view(self.data.dtype))

    def part(self, dim: int, start: int, stop: int) -> QuantizedTensor | None:
        """The cast of some rows (dim 0) or columns (1); None if a block reaches beyond them.

        Example:
            >>> import ottava
            >>> whole = ottava.quantize(torch.randn(6, 8), ottava.QuantizationSpec(ottava.E4M3))
            >>> torch.equal(whole.part(0, 2, 4).dequantize(), whole.dequantize()[2:4])
            True
        """
        block, blocks = (self.spec.granularity.rows, self.spec.granularity.cols)[dim], slice(None)
        if block is not None:
            if start % block or (stop % block and stop != self.shape[dim]):
                return None
            blocks = slice(start // block, -(-stop // block))
        before = (slice(None),) * dim
        data, scale_inv = self.data[(*before, slice(start, stop))], self.scale_inv[(*before, blocks)]
        return replace(self, data=data.contiguous(), scale_inv=scale_inv.contiguous())

    def t(self) -> QuantizedTensor:
        """The transpose, sharing memory.

        Raises:
            ValueError: blocks of x are not blocks of x.T (1x128, per row): quantize x.T from high precision instead.
        """
        if not self.spec.granularity.transposes or self.spec.transform is not None:
            raise ValueError(f"QuantizedTensor.t: {self.spec} blocks of x are not blocks of x.T; quantize x.T itself")
        return QuantizedTensor(self.data.t(), self.scale_inv.t(), self.spec, self.dtype, self.amax)


@dataclass
class Lent:
    """What FSDP2's last gather has brought of a weight. All aliases of the gathered weight share it.

    FSDP2 frees the codes after a forward and gathers again for the backward, so a layer keeps no operand of such a
    weight: its backward asks the weight once more. Nor is W.T turned in memory between them.
    """

    holds_w: bool = True
    """Whether codes and scales are those of W."""
    of_w_t: Callable[[], QuantizedTensor] | None = None
    """Makes the operand of W.T where this was gathered with scales of its own."""
    w_t: QuantizationSpec | None = None
    """How W.T is cast where it has scales of its own; None: it has the codes of W, or is turned from them."""
    amax: Tensor | None = None
    """fp32 (1, 1): of the whole weight, where the ranks know it."""
    again: bool = False
    """Whether a backward may run the forward again (activation checkpointing), by what the last forward has seen."""


Operand = Tensor | QuantizedTensor
"""One side of a GEMM: quantized, or passed through in high precision."""
Beside = tuple[Operand | None, Operand | None]
"""The operands that x and x.T meet in their GEMMs, where those were cast before."""
RunGemm = Callable[[QuantizedTensor, QuantizedTensor, Tensor | None], Tensor]
"""(a (M, K), b (N, K), bias (N,) or None) -> y (M, N)."""
GemmCall = tuple[QuantizedTensor, QuantizedTensor, torch.dtype, Tensor | None, bool]
"""What decides who multiplies, and how: a (M, K), b (N, K), the dtype of y, the bias, and fast_accum of `ops.gemm`."""


class Both(NamedTuple):
    """Casts of x and of x.T."""

    row: QuantizedTensor | None
    """Of x."""
    col: QuantizedTensor | None
    """Of x.T."""
    amax: Tensor | None
    """Of the first of them, one entry per block; None: the kernel has staged it."""
