"""Quantize on NVIDIA GPUs by Triton kernels: the bits of `reference`, reading x as few times as the recipe allows.

    current, blocks       one pass: the codes of x and of x.T, their scales and amax
    current, tensor, row  two passes: amax, then codes; the second runs backwards, so that it begins in the L2 cache
    delayed, guarded      one pass with the predicted scale; a second launch stages the amax for the next scale, and
                          casts again if the prediction missed

Bytes per bf16 element, x and x.T together: 4, 6, 4. In the place of x may stand rows that the kernels make as they read
(`UnmadeRows`): a norm or an activation then reads and writes nothing of its own. `device_code` holds the kernels; the
first launch imports Triton. They keep no state, never wait for the device, and work in a CUDA graph.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ottava.kernels.gate import refusal
from ottava.kernels.reference import Cast, check_matrix
from ottava.kernels.triton.launch import Launch, Named
from ottava.numerics.formats import E2M1, E2M3, E3M2, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ
from ottava.numerics.scaling import BLOCK_1X128, PER_TENSOR, Granularity, column_major
from ottava.numerics.tensor import QuantizationSpec

Casts = tuple[Cast | None, Cast | None]
"""Of x and of x.T."""

NAME = "triton"

_FORMATS = (E4M3, E5M2, E2M1, E2M3, E3M2, E4M3FNUZ, E5M2FNUZ)
_TILE = 128
_AMPERE, _HOPPER, _CONSUMER_BLACKWELL = (8, 0), (9, 0), (12, 0)
FUSED = MappingProxyType({"enable_fp_fusion": True})
"""Of every launch but AdamW's. Without a word Triton 3.9 warns that 3.10 will fuse no multiply-adds, which would be
other bits; -W error makes an error of that."""
ACTIVATION_LAUNCH = MappingProxyType({"num_warps": 8, "maxnreg": None})
"""An activation takes registers beside those of the cast; its gradient reads three tensors."""


def supports_quantize(x: Tensor, spec: QuantizationSpec, scale: Tensor | None = None) -> str | None:
    """Why these kernels do not cast x (R, C) to spec with that scale; None if they do."""
    if x.device.type != "cuda":
        return f"{NAME}: runs on cuda; got {x.device.type}"
    if reason := refuses(spec):
        return reason
    if scale is not None and spec.granularity != PER_TENSOR:
        return f"{NAME}: takes a given scale for a whole tensor; got one for {spec.granularity}"
    if scale is not None and scale.device != x.device:  # a kernel would read an address of another memory
        return f"{NAME}: the scale is on {scale.device} and x on {x.device}"
    if x.numel() == 0:
        return f"{NAME}: an empty tensor"
    return refuse_device(x.device, x)


@functools.lru_cache(maxsize=256)
def refuses(spec: QuantizationSpec) -> str | None:
    """Why these kernels do not cast to spec on any device; None if they do."""
    if spec.format not in _FORMATS:
        return f"{NAME}: casts to {', '.join(map(str, _FORMATS))}; got {spec.format}"
    if spec.rounding != "nearest_even":
        return f"{NAME}: rounds to nearest even; got {spec.rounding}"
    if spec.scale_format == "e4m3":
        return f"{NAME}: has no two-level scales (e4m3)"
    if _mode(spec.granularity) is None:
        return f"{NAME}: takes tensor, row and blocks of powers of two up to {_TILE}; got {spec.granularity}"
    return None


def refuse_fused(rows: UnmadeRows) -> str | None:
    """Why a kernel of its own makes these rows before the cast; None if the cast makes them."""
    # a cast's tile lies in one half of dx, so each half takes its own exponential: 57 to 62 instructions an element of
    # dx on sm_90, bound by issue; 29 with both halves in one tile and 13 to 22 for the cast leave time for 4 more bytes
    if rows.is_gradient and rows.gated:
        return f"{NAME}: a gate's gradient takes fewer instructions alone, and no GPU has measured otherwise"
    return None


def quantize(x: Tensor, spec: QuantizationSpec, scale: Tensor | None = None) -> Cast:
    """Casts x (R, C) to spec; arguments, results and errors as `reference.quantize`. The codes are contiguous.

    `supports_quantize` must take x, or the Triton interpreter must be on.
    """
    cast, _ = quantize_both(x, spec, None, scale)  # one kernel serves both: the side that nobody wants is compiled away
    assert cast is not None
    return cast


def quantize_both(
    x: Tensor | UnmadeRows,
    spec: QuantizationSpec | None,
    spec_t: QuantizationSpec | None,
    scale: Tensor | None = None,
    staged: Tensor | None = None,
) -> Casts:
    """Casts x (R, C) to spec and x.T (C, R) to spec_t, both from one reading of x if their settings agree.

    Args:
        x: fp32, bf16 or fp16; any strides. Or rows that the kernels make while they cast them.
        spec, spec_t: None for a cast that is not wanted.
        scale: one fp32 entry on the device of x, as in `reference.quantize`.
        staged: `Quantizer.staged`, on the device of x, only with a scale: the kernel raises it to this cast's amax. A
            fourth entry of 0 is memory for the cast, which then launches nothing to make some.
    Returns:
        (Cast of x, Cast of x.T), both contiguous; if x and x.T share their scales, scale_inv and amax share memory.
    Raises:
        TypeError: dtype.  ValueError: x is not a matrix.
    """
    room = 0 if staged is None else staged.numel()
    return plan_both(x, spec, spec_t, scale is not None, room)(x, scale, staged)


def plan_both(
    x: Tensor | UnmadeRows,
    spec: QuantizationSpec | None,
    spec_t: QuantizationSpec | None,
    predicted: bool,
    staged: int,
) -> RunBoth:
    """`quantize_both` for all x that lie like this one; arguments and errors as there.

    Args:
        predicted: whether it gets a scale.
        staged: entries of the staged vector; 0 if it gets none.
    """
    if isinstance(x, Tensor):
        check_matrix(x)
        if column_major(x):  # x.T is the one that lies row by row
            turned = plan_both(x.t(), spec_t, spec, predicted, staged)
            return lambda x, scale, staged: turned(x.t(), scale, staged)[::-1]  # type: ignore[union-attr]
    # one launch has one format for both sides; two formats read x twice
    if not _one_launch(spec, spec_t):
        row, col = plan_both(x, spec, None, predicted, staged), plan_both(x, None, spec_t, predicted, staged)
        return lambda x, scale, staged: (row(x, scale, staged)[0], col(x, scale, staged)[1])
    read, named = (x, ()) if isinstance(x, Tensor) else (x.x, x.named)
    plan = _plan_predicted if predicted else _plan_current
    key = (_device_code(), x.shape, read.stride(), read.dtype, x.device, named)
    return plan(key, spec, spec_t, staged)


@dataclass(frozen=True, slots=True, eq=False)
class UnmadeRows:
    """Rows (M, K) that a kernel makes of x (M, K), or (M, 2 K) with a gate, while it casts them; see `rows`. Or the
    gradient of an activation, in the shape of x."""

    make: str
    """A name of the device code."""
    x: Tensor
    dtype: torch.dtype
    """Of the rows."""
    gated: bool = False
    beside: Tensor | None = None
    """Read with x: mean and rstd of a norm, fp32 (2, M); dy of an activation, (M, features), for its gradient."""
    gamma: Tensor | None = None
    """(K,), any float dtype."""
    beta: Tensor | None = None
    """(K,), any float dtype."""
    zero_centered: bool = False
    """Whether gamma is added to 1."""

    @property
    def is_gradient(self) -> bool:
        """Whether dy of an activation lies beside x."""
        return self.beside is not None and not self.make.endswith("norm")

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K)."""
        return self.x.shape[0], self.x.shape[1] // (2 if self.gated and not self.is_gradient else 1)

    @property
    def nbytes(self) -> int:
        """That the rows would take."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def device(self) -> torch.device:
        """That of x."""
        return self.x.device

    @property
    def extra(self) -> tuple[Tensor | None, ...]:
        """The tensors that a kernel reads with x."""
        return self.beside, self.gamma, self.beta

    @property
    def named(self) -> Named:
        """The constants of a kernel that makes them."""
        named: Named = (("MAKE", self.make), ("FLAG", self.gated or self.zero_centered), ("DTYPE", self._rounded))
        return named if self.make.endswith("norm") else (*named, *ACTIVATION_LAUNCH.items())

    @property
    def _rounded(self) -> str:
        return "" if self.dtype == self.x.dtype else {torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]


class _Side(NamedTuple):
    """Memory for one of the two results."""

    data: Tensor
    scale_inv: Tensor
    amax: Tensor  # bits, int32


RunBoth = Callable[["Tensor | UnmadeRows", Tensor | None, Tensor | None], Casts]
"""(x, scale, staged) -> the casts; everything else is decided."""
_Key = tuple[Any, tuple[int, int], tuple[int, ...], torch.dtype, torch.device, Named]  # device code, x and named


@functools.lru_cache(maxsize=1024)
def _plan_current(key: _Key, spec: QuantizationSpec | None, spec_t: QuantizationSpec | None, _: int) -> RunBoth:
    """Casts with scales of their own."""
    device_code, shape, strides, _dtype, device, named = key
    in_gemm_order = turned(spec, spec_t)
    row = _Memory(shape, spec, False, None, in_gemm_order)
    col = _Memory((shape[1], shape[0]), spec_t, True, spec, in_gemm_order)
    modes = tuple(dict.fromkeys(side.mode for side in (row, col) if side.mode in _WHOLE))
    sizes = (*shape, *strides)
    # blocks lie inside a tile and need no pass of their own
    looks = None if not modes else _bound(device_code.amax_kernel, sizes, (), amax_launch(modes), named)
    known = spec or spec_t  # one launch casts both sides, so either tells the format
    assert known is not None
    # the compiler fits a tile of 128 x 128 into 128 registers a thread: for sm_120 it spills some
    roomy = device.type == "cuda" and torch.cuda.get_device_capability(device) < _CONSUMER_BLACKWELL
    constants = cast_launch(spec, spec_t, _converts(device), roomy)
    casts = _bound(device_code.cast_kernel, sizes, (_top(known),), constants, named)
    finish = _finish(spec, spec_t, shared(spec, spec_t))

    def run(x: Tensor | UnmadeRows, scale: Tensor | None, staged: Tensor | None) -> Casts:
        read, extra = (x, ()) if isinstance(x, Tensor) else (x.x, x.extra)
        of_x = row.make(read, None, None)
        of_x_t = col.make(read, of_x, None)
        if looks is not None:
            # a launch takes all three; what its mode does not name stays untouched
            buffers = [of_x.amax] * 3
            for side, made in ((row, of_x), (col, of_x_t)):
                if side.mode in _WHOLE:
                    buffers[_WHOLE.index(side.mode)] = made.amax
            looks((read, *buffers), extra)
        casts((read, *of_x, *of_x_t), extra)
        return finish(of_x, of_x_t)

    return run


@functools.lru_cache(maxsize=1024)
def _plan_predicted(key: _Key, spec: QuantizationSpec | None, spec_t: QuantizationSpec | None, stages: int) -> RunBoth:
    """Casts with a given scale; stages: entries of the staged vector, or 0."""
    device_code, shape, strides, _dtype, device, named = key
    known = spec or spec_t
    assert known is not None
    row, col = _Memory(shape, spec, False, None), _Memory((shape[1], shape[0]), spec_t, True, spec)
    tops = _top(known), known.format.max * 2.0**-known.guard_bits
    # both are launched always: whether the second has work is known on the device only
    launches = []
    for redo in (False, True):
        sides = spec is not None, spec_t is not None
        constants = predicted_launch(known, *sides, redo, _converts(device), redo and stages > 0)
        most = filling(device) if redo else None
        launches.append(_bound(device_code.predicted_kernel, (*shape, *strides), tops, constants, named, most))
    finish = _finish(spec, spec_t, spec is not None and spec_t is not None)

    def run(x: Tensor | UnmadeRows, scale: Tensor | None, staged: Tensor | None) -> Casts:
        assert scale is not None
        read, extra = (x, ()) if isinstance(x, Tensor) else (x.x, x.extra)
        # the fourth entry of a staged vector is zeroed memory for the amax, in the allocation that is there already
        room = staged[3:].view(torch.int32) if staged is not None and stages > 3 else None
        of_x = row.make(read, None, room)
        of_x_t = col.make(read, of_x, room)
        one = of_x if spec is not None else of_x_t
        stage = scale if staged is None else staged
        for launch in launches:
            launch((read, scale, of_x.data, of_x_t.data, one.scale_inv, one.amax, stage), extra)
        return finish(of_x, of_x_t)

    return run


_WHOLE = ("tensor", "rows", "cols")
"""Modes whose amax is found by a launch of its own, in the order of its buffers."""


def _bound(
    kernel: Any,
    sizes: tuple[int, ...],
    floats: tuple[float, ...],
    constants: Mapping[str, Any],
    named: Named,
    most: int | None = None,
) -> Launch:
    """A launch with a program for each tile of a matrix, `most` at most; sizes: rows, columns, strides."""
    programs = -(-sizes[0] // constants["TR"]) * -(-sizes[1] // constants["TC"])
    return Launch(kernel, programs if most is None else min(programs, most), sizes, floats, constants, named)


@functools.lru_cache(maxsize=256)
def shared(spec: QuantizationSpec | None, spec_t: QuantizationSpec | None) -> bool:
    """Whether x.T has the codes of x."""
    return (
        spec is not None
        and spec_t is not None
        and _settings(spec) == _settings(spec_t)
        and spec.granularity == spec_t.granularity == spec.granularity.transposed
    )


@functools.lru_cache(maxsize=256)
def turned(spec: QuantizationSpec | None, spec_t: QuantizationSpec | None) -> bool:
    """Whether the scales of both sides lie as torch's scaled GEMM reads them: strides (1, rows), not (columns, 1)."""
    return spec is not None and spec_t is not None and spec.granularity == spec_t.granularity == BLOCK_1X128


class _Memory:
    """How the memory of one result is made.

    Args:
        shape: of the codes.
        spec: None if it is not wanted.
        transposed: whether it is that of x.T.
        partner: spec of the other result; with one scale per tensor both share scale and amax, so one memory is set
            to 0.
        turned: whether its scales lie column by column.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        spec: QuantizationSpec | None,
        transposed: bool,
        partner: QuantizationSpec | None,
        turned: bool = False,
    ) -> None:
        self.turned = turned
        self.shape, (self.mode, _) = shape, _mode_and_block(spec, transposed)
        self.grid = (0, 0) if spec is None else spec.granularity.grid_shape(shape)
        self.joins = partner is not None and self.mode == _mode_and_block(partner, False)[0] == "tensor"

    def make(self, memory: Tensor, partner: _Side | None, room: Tensor | None) -> _Side:
        """room: int32 (1,) of 0 for the amax of a tensor."""
        if not self.mode:  # no kernel touches it
            return _Side(memory, memory, memory)  # an address that exists: Triton takes no None here
        data = memory.new_empty(self.shape, dtype=torch.uint8)
        if self.joins and partner is not None:
            return _Side(data, partner.scale_inv, partner.amax)  # other codes, the same scale and amax
        if self.turned:
            rows = self.grid[::-1]
            scale_inv, amax = (memory.new_empty(rows, dtype=dtype).t() for dtype in (torch.float32, torch.int32))
            return _Side(data, scale_inv, amax)
        if room is not None and self.mode == "tensor":
            amax = room.view(self.grid)
        else:
            # tiles raise a shared amax by atomics from 0; a block is written once
            amax = (memory.new_empty if self.mode == "blocks" else memory.new_zeros)(self.grid, dtype=torch.int32)
        return _Side(data, memory.new_empty(self.grid, dtype=torch.float32), amax)


def _finish(
    spec: QuantizationSpec | None, spec_t: QuantizationSpec | None, one_scale: bool
) -> Callable[[_Side, _Side], Casts]:
    """Memory -> the casts."""
    storage, storage_t = (None if one is None else one.format.storage_dtype for one in (spec, spec_t))
    one_scale = one_scale and spec is not None and spec_t is not None
    # one entry is its own transpose, and each call takes time of the host
    alike = spec is not None and spec.granularity == PER_TENSOR

    def finish(row: _Side, col: _Side) -> Casts:
        # bits of magnitudes have the order of the numbers, so integers were compared
        first = None if storage is None else Cast(row.data.view(storage), row.scale_inv, row.amax.view(torch.float32))
        if storage_t is None:
            return first, None
        codes = col.data.view(storage_t)
        if first is None or not one_scale:
            return first, Cast(codes, col.scale_inv, col.amax.view(torch.float32))
        if alike:
            return first, Cast(codes, first.scale_inv, first.amax)
        return first, Cast(codes, first.scale_inv.t(), first.amax.t())

    return finish


def _mode(granularity: Granularity) -> str | None:
    """The mode of `device_code` for a granularity; None: no kernel has such blocks."""
    rows, cols = granularity.rows, granularity.cols
    if rows is None or cols is None:
        return {(None, None): "tensor", (1, None): "rows", (None, 1): "cols"}.get((rows, cols))
    # a block lies inside one tile
    return "blocks" if all(size <= _TILE and size & (size - 1) == 0 for size in (rows, cols)) else None


@functools.lru_cache(maxsize=256)
def _one_launch(spec: QuantizationSpec | None, spec_t: QuantizationSpec | None) -> bool:
    return spec is None or spec_t is None or _settings(spec) == _settings(spec_t)


def _settings(spec: QuantizationSpec) -> tuple[Any, ...]:
    """The settings that both results of one launch must share."""
    return spec.format, spec.scale_format, spec.margin, spec.scaling, spec.guard_bits


@functools.lru_cache(maxsize=256)
def _top(spec: QuantizationSpec) -> float:
    return float(spec.format.max * 2.0**-spec.margin)


@functools.lru_cache(maxsize=256)
def cast_launch(
    spec: QuantizationSpec | None, spec_t: QuantizationSpec | None, converts: bool, roomy: bool = True
) -> Mapping[str, Any]:
    """The compile-time parameters of a launch of `cast_kernel`; converts: the device casts to FP8 itself; roomy: 128
    registers a thread are enough, as on all but sm_120."""
    known = spec or spec_t
    assert known is not None
    one_scale = shared(spec, spec_t)
    (mode, block), (mode_t, block_t) = (
        _mode_and_block(spec, False),
        _mode_and_block(None if one_scale else spec_t, True),
    )
    sides = {"MODE": mode, "BR": block[0], "BC": block[1], "MODE_T": mode_t, "BR_T": block_t[0], "BC_T": block_t[1]}
    sides["TURNED"] = turned(spec, spec_t)
    constants = {**sides, "SHARED": one_scale, **_constants(known, converts), **_tile(max(block[0], block_t[0]))}
    # with more registers for each of 256 threads a multiprocessor would hold one block, and wait for its loads
    two_blocks = roomy and constants["NATIVE"] in ("E4M3", "E5M2") and constants["TR"] == _TILE
    return MappingProxyType({**constants, "maxnreg": 128} if two_blocks else constants)


@functools.lru_cache(maxsize=256)
def predicted_launch(
    spec: QuantizationSpec, row: bool, col: bool, redo: bool, converts: bool, stages: bool = False
) -> Mapping[str, Any]:
    """As `cast_launch`, for `predicted_kernel`; row, col: whether the codes of x and of x.T are wanted."""
    wanted = {"REDO": redo, "STAGES": stages, "GUARDED": spec.scaling == "guarded", "ROW": row, "COL": col}
    return MappingProxyType({**wanted, **_constants(spec, converts), **_tile(1)})


@functools.lru_cache(maxsize=256)
def amax_launch(modes: tuple[str, ...]) -> Mapping[str, Any]:
    """As `cast_launch`, for `amax_kernel`; modes: of "tensor", "rows", "cols"."""
    return MappingProxyType({mode.upper(): mode in modes for mode in ("tensor", "rows", "cols")} | _tile(1))


@functools.lru_cache(maxsize=256)
def _mode_and_block(spec: QuantizationSpec | None, transposed: bool) -> tuple[str, tuple[int, int]]:
    """In the orientation of x; a block is 1 x 1 unless the mode is "blocks"."""
    if spec is None:
        return "", (1, 1)
    granularity = spec.granularity.transposed if transposed else spec.granularity
    mode = _mode(granularity)
    assert mode is not None
    return mode, (granularity.rows or 1, granularity.cols or 1) if mode == "blocks" else (1, 1)


def _constants(spec: QuantizationSpec, converts: bool) -> dict[str, Any]:
    """The constants of the format, under the names of the kernels' parameters."""
    fmt = spec.format
    return {
        # the power of two below top / amax is that of E8M0, found without a division; from 4 on no scale is subnormal
        "SCALE_FORMAT": "e8m0" if spec.scale_format == "pow2" and _top(spec) >= 4 else spec.scale_format,
        "E8M0_SHIFT": spec.margin - fmt.emax,
        "E8M0_MANTISSA": int(math.ldexp(fmt.max, 23 - fmt.emax)) - (1 << 23),  # that of fmt.max, as fp32 holds it
        "MAX": fmt.max,
        "MANTISSA": fmt.mantissa_bits,
        "BIAS": fmt.bias,
        "SIGN": fmt.bits - 1,  # place of the sign bit
        "HAS_NAN": fmt.has_nan,
        "NATIVE": "FNUZ" if fmt.specials == "fnuz" else fmt.name if converts and fmt in (E4M3, E5M2) else "",
    }


def _tile(block_rows: int) -> dict[str, Any]:
    """64 x 128 elements, or as many rows as a block has, from 32 on: 64 elements a thread share its addresses and the
    scales of its 16 columns."""
    rows = _TILE // 2 if block_rows == 1 else max(block_rows, 32)
    return {"TR": rows, "TC": _TILE, "num_warps": rows // 16, **FUSED}


@functools.cache
def filling(device: torch.device) -> int:
    """As many programs as a device holds at once; the interpreter takes 3."""
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def _converts(device: torch.device) -> bool:
    """Whether the device converts fp32 to FP8 itself, as the interpreter of the tests does.

    sm_89 does, but Triton 3.6 truncates through FP16 there, which gives other bits just beside a tie.
    """
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= _HOPPER


def refuse_device(device: torch.device, *read: Tensor) -> str | None:
    """Why none of these kernels reads such tensors on a CUDA device; None if they do."""
    if read and (reason := refusal(*read)):
        return f"{NAME}: takes plain tensors; {reason}"
    if not has_triton():
        return f"{NAME}: Triton is not installed; pip install triton"
    capability = torch.cuda.get_device_capability(device)
    if capability < _AMPERE:
        return f"{NAME}: needs sm_80 or later; this device is sm_{capability[0]}{capability[1]}"
    return None


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed; looked up once a process, without an import."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _device_code() -> Any:
    return importlib.import_module("ottava.kernels.triton.device_code")
