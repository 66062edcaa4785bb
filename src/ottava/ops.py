"""The two operations of ottava, `quantize` and `gemm`, and the choice of the kernel that runs them.

The first kernel of an explicit tuple that supports a call gets it; `explain` lists every refusal. Nothing falls back
silently: what ran is handed to `log`, and `receipt` shows it. Inside torch.compile both operations are opaque custom
operators (`ottava::quantize`, `ottava::gemm`), so a compiled model gives the bits of an eager one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ottava.errors import unknown_name
from ottava.kernels import bf16_mm, decoded, native_cpu, native_gemm, reference, scaled_mm, triton_quantize
from ottava.quantized_tensor import Operand, QuantizationSpec, QuantizedTensor, refuse_pair
from ottava.recipe import Compute


class GemmKernel(Protocol):
    """What a kernel file offers; see `kernels`."""

    NAME: str
    NATIVE: bool

    def supports_gemm(
        self, a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None
    ) -> str | None:
        """None, or the reason why not."""

    def padding(self, a: QuantizedTensor, b: QuantizedTensor) -> str:
        """What is zero-padded."""

    def gemm(
        self, a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool
    ) -> Tensor:
        """(M, K), (N, K) -> (M, N)."""


class QuantizeKernel(Protocol):
    """What a kernel file that casts offers."""

    NAME: str

    def supports_quantize(self, x: Tensor, spec: QuantizationSpec, scale: Tensor | None) -> str | None:
        """None, or the reason why not."""

    def quantize(self, x: Tensor, spec: QuantizationSpec, scale: Tensor | None) -> reference.Cast:
        """(R, C) -> codes, scale_inv, amax: the bits of the reference."""


_CPU_CASTS: tuple[QuantizeKernel, ...] = (native_cpu, reference)
_ACCELERATOR_CASTS: tuple[QuantizeKernel, ...] = (triton_quantize, reference)
# On a CPU torch's scaled GEMM is slower than the reference and rounds more often: an oracle there, not an engine.
_CPU_KERNELS: tuple[GemmKernel, ...] = (native_gemm, bf16_mm, reference, scaled_mm)
_ACCELERATOR_KERNELS: tuple[GemmKernel, ...] = (scaled_mm, decoded, reference)


@dataclass(frozen=True, slots=True)
class GemmRecord:
    """What one GEMM really ran."""

    lhs: str
    """Spec or dtype of the left operand."""
    rhs: str
    """Spec or dtype of the right operand."""
    m: int
    """Rows of the result."""
    n: int
    """Columns of the result."""
    k: int
    """Contracted length."""
    kernel: str
    """Name of the kernel."""
    quantized: bool
    """Whether both operands were quantized."""
    native: bool
    """Whether they stayed so inside the GEMM; False: emulated."""
    padding: str
    """What was zero-padded, "" if nothing."""
    refusals: tuple[str, ...]
    """Why faster kernels did not run."""


Log = Callable[[GemmRecord], None]


class Both(NamedTuple):
    """Casts of x and of x.T."""

    row: QuantizedTensor | None
    """Of x."""
    col: QuantizedTensor | None
    """Of x.T."""
    amax: Tensor | None
    """Of the first of them, one entry a block; None: it has been staged."""


def quantize(x: Tensor, spec: QuantizationSpec, *, scale: Tensor | None = None) -> QuantizedTensor:
    """Casts a matrix to `spec`.

    Args:
        x: (R, C); float32, bfloat16 or float16; any strides, also empty.
        scale: fp32, one entry, multiplies x before the cast (delayed scaling); None: the current scale of each block.
    Returns:
        QuantizedTensor: .data codes (R, C) | .scale_inv fp32, one entry per block | .dequantize().
    Raises:
        TypeError: dtype.  ValueError: not a matrix.
    Edge cases: zero blocks have scale 1; infinities saturate; NaN stays; see `scaling.compute_scale`, `rounding`.

    Example:
        >>> from ottava.formats import E4M3
        >>> x_q = quantize(torch.tensor([[0.5, -3.0], [14.0, 7.0]]), QuantizationSpec(E4M3))
        >>> x_q.scale_inv, x_q.data.float()                                # 14 / 448, and what is kept in FP8
        (tensor([[0.0312]]), tensor([[ 16., -96.],
                [448., 224.]]))
    """
    return quantize_with_amax(x, spec, scale=scale)[0]


def quantize_with_amax(
    x: Tensor, spec: QuantizationSpec, *, scale: Tensor | None = None
) -> tuple[QuantizedTensor, Tensor]:
    """As `quantize`, and the amax of each block that the cast saw; where `scale` is 0 the current scale is used."""
    if torch.compiler.is_compiling():
        data, scale_inv, amax = torch.ops.ottava.quantize(x, spec.key, scale)
    else:
        data, scale_inv, amax = _quantize(x, spec, scale)
    return QuantizedTensor(data, scale_inv, spec, x.dtype), amax


def quantize_both(
    x: Tensor,
    spec: QuantizationSpec | None,
    spec_t: QuantizationSpec | None,
    *,
    scale: Tensor | None = None,
    staged: Tensor | None = None,
) -> Both | None:
    """x cast to spec and x.T cast to spec_t, where a kernel gives them from one reading of x; None where none does.

    Then cast them one by one: the bits are the same.

    Args:
        x: (R, C); spec, spec_t: None for one that is not wanted.
        scale: as for `quantize`, one for both.
        staged: fp32 (3,), what a door has seen since its last boundary; the same launch raises it to this cast's amax.
    """
    if torch.compiler.is_compiling():
        if spec is None or spec_t is None or not _reads_once(x):
            return None
        at_once, one_scale = _both_of(spec.key, spec_t.key)
        if not at_once:
            return None
        data, scale_inv, amax, data_t, own = torch.ops.ottava.quantize_both(x, spec.key, spec_t.key, scale)
        scale_inv_t = scale_inv.t() if one_scale else own
        first = QuantizedTensor(data, scale_inv, spec, x.dtype)
        return Both(first, QuantizedTensor(data_t, scale_inv_t, spec_t, x.dtype), amax)
    if spec is not None and spec_t is not None and scale is None and staged is None:
        x = x.detach()
        if native_cpu.supports_quantize_both(x, spec, spec_t) is None:
            here, there = native_cpu.quantize_both(x, spec, spec_t)
            first = QuantizedTensor(here.data, here.scale_inv, spec, x.dtype)
            return Both(first, QuantizedTensor(there.data, there.scale_inv, spec_t, x.dtype), here.amax)
    if any(s is not None and triton_quantize.supports_quantize(x, s, scale) for s in (spec, spec_t)):
        return None
    casts = triton_quantize.quantize_both(x.detach(), spec, spec_t, scale, staged)
    row, col = (
        QuantizedTensor(cast.data, cast.scale_inv, wanted, x.dtype) if cast is not None and wanted is not None else None
        for cast, wanted in zip(casts, (spec, spec_t), strict=True)
    )
    return Both(row, col, next(cast.amax for cast in casts if cast is not None) if staged is None else None)


def dequantize(x_q: QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """As `QuantizedTensor.dequantize`, bit for bit, by the fastest kernel that takes it.

    Args:
        dtype: that of the original by default.

    Example:
        >>> from ottava.formats import E4M3
        >>> dequantize(quantize(torch.tensor([[1.0, 2.0]]), QuantizationSpec(E4M3)))
        tensor([[1., 2.]])
    """
    wanted = dtype or x_q.dtype
    if (
        not torch.compiler.is_compiling()
        and wanted in (torch.float32, torch.bfloat16)
        and native_cpu.supports_decode(x_q.data, x_q.spec.format) is None
    ):
        return native_cpu.dequantize(x_q, wanted)
    return x_q.dequantize(wanted)


def gemm(
    a: Operand,
    b: Operand,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accum: bool = False,
    compute: Compute = "native",
    backend: str | None = None,
    log: Log | None = None,
) -> Tensor:
    """y (M, N) = a (M, K) @ b (N, K).T + bias, both contracted over their last dimension.

    Args:
        a, b: two matrices, both quantized or both not.
        out_dtype: of y; rounded to once.
        bias: (N,), added before that rounding.
        fast_accum: let Hopper keep partial sums in its short accumulator.
        compute: "bf16" decodes quantized operands and multiplies in BF16.
        backend: name of the kernel to use; None takes the first that supports the call.
        log: called with a GemmRecord of what ran (not while compiling).
    Raises:
        ValueError: shapes, a pair of formats that no hardware takes, an unknown or unsupporting backend; on every
            device alike.

    Example:
        >>> from ottava.formats import E4M3
        >>> a, b = (quantize(torch.eye(2) * s, QuantizationSpec(E4M3)) for s in (2.0, 8.0))
        >>> gemm(a, b, out_dtype=torch.bfloat16)
        tensor([[16.,  0.],
                [ 0., 16.]], dtype=torch.bfloat16)
    """
    _check(a, b, bias)
    asked_for = (a, b)
    if compute == "bf16":
        a, b = (dequantize(t, torch.bfloat16) if isinstance(t, QuantizedTensor) else t for t in (a, b))
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        if torch.compiler.is_compiling():
            return torch.ops.ottava.gemm(  # type: ignore[no-any-return]
                a.data, a.scale_inv, a.spec.key, b.data, b.scale_inv, b.spec.key, out_dtype, bias, fast_accum
            )
        kernel, refusals = _choose(a, b, out_dtype, bias, backend)
        with _no_autocast(a.device):
            y = kernel.gemm(a, b, out_dtype, bias, fast_accum)
        if log is not None:
            log(_record(asked_for, kernel.NAME, kernel.NATIVE, kernel.padding(a, b), refusals))
        return y
    assert isinstance(a, Tensor)
    assert isinstance(b, Tensor)  # _check refused mixed pairs
    with _no_autocast(a.device):
        y = _dense(a, b, bias).to(out_dtype)
    if log is not None and not torch.compiler.is_compiling():
        log(_record(asked_for, f"torch.mm {_short(a.dtype)}", False, "", ()))
    return y


def explain(a: QuantizedTensor, b: QuantizedTensor, *, out_dtype: torch.dtype, bias: Tensor | None = None) -> str:
    """Which kernel `gemm` would run on these operands, and why not the others, one a line.

    Example:
        >>> from ottava.formats import E4M3
        >>> a = quantize(torch.ones(2, 2), QuantizationSpec(E4M3))
        >>> lines = explain(a, a, out_dtype=torch.float32).splitlines()  # which runs: whether a C++ compiler is there
        >>> [line.split(":")[0] for line in lines]
        ['native_gemm', 'bf16_mm', 'reference', 'scaled_mm']
        >>> lines[1]
        "bf16_mm: torch's BF16 GEMM gives bfloat16 only; got torch.float32"
    """
    _check(a, b, bias)
    chosen, _ = _choose(a, b, out_dtype, bias, None)
    lines = []
    for kernel in _kernels(a.device):
        reason = kernel.supports_gemm(a, b, out_dtype, bias)
        if kernel is chosen:
            lines.append(f"{kernel.NAME}: runs")
        else:
            lines.append(reason or f"{kernel.NAME}: supported, but {chosen.NAME} comes first on {a.device.type}")
    return "\n".join(lines)


def explain_quantize(x: Tensor, spec: QuantizationSpec, *, scale: Tensor | None = None) -> str:
    """Which kernel `quantize` would run on this matrix, and why not those before it, one a line.

    Example:
        >>> from ottava.formats import E4M3
        >>> explain_quantize(torch.ones(2, 2), QuantizationSpec(E4M3, rounding="stochastic"))
        'native_cpu: rounds to nearest even; got stochastic\\nreference: runs'
    """
    lines = []
    for kernel in _casts(x.device):
        if reason := kernel.supports_quantize(x.detach(), spec, scale):
            lines.append(reason)
        else:
            return "\n".join([*lines, f"{kernel.NAME}: runs"])
    raise AssertionError("the reference takes every cast")


def _check(a: Operand, b: Operand, bias: Tensor | None) -> None:
    rows, cols = a.shape, b.shape
    if len(rows) != 2 or len(cols) != 2 or rows[1] != cols[1]:
        raise ValueError(
            f"gemm: got {_shapes(a, b)}; needs (M, K) and (N, K): both are contracted over their last dimension"
        )
    if bias is not None and tuple(bias.shape) != (cols[0],):
        raise ValueError(f"gemm: got bias {tuple(bias.shape)} for {_shapes(a, b)}; needs ({cols[0]},)")
    specs = [t.spec if isinstance(t, QuantizedTensor) else None for t in (a, b)]
    if reason := refuse_pair(specs[0], specs[1]):
        raise ValueError(f"gemm: {specs[0] or 'high precision'} x {specs[1] or 'high precision'}: {reason}")


def _shapes(a: Operand, b: Operand) -> str:
    return f"a {tuple(a.shape)} and b {tuple(b.shape)}"


def _casts(device: torch.device) -> tuple[QuantizeKernel, ...]:
    return _CPU_CASTS if device.type == "cpu" else _ACCELERATOR_CASTS


def _kernels(device: torch.device) -> tuple[GemmKernel, ...]:
    return _CPU_KERNELS if device.type == "cpu" else _ACCELERATOR_KERNELS


def _choose(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None, backend: str | None
) -> tuple[GemmKernel, tuple[str, ...]]:
    kernels = _kernels(a.device)
    if backend is not None:
        named = [kernel for kernel in kernels if backend == kernel.NAME]
        if not named:
            raise ValueError(f"gemm: {unknown_name('backend', backend, [kernel.NAME for kernel in kernels])}")
        if reason := named[0].supports_gemm(a, b, out_dtype, bias):
            raise ValueError(f"gemm: backend {backend!r} was asked for, but {reason}")
        return named[0], ()
    refusals: list[str] = []
    for kernel in kernels:
        reason = kernel.supports_gemm(a, b, out_dtype, bias)
        if reason is None:
            return kernel, tuple(refusals)
        refusals.append(reason)
    raise ValueError("gemm: no kernel takes this call. " + "; ".join(refusals))


def _dense(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if a.dtype != b.dtype:
        raise ValueError(f"gemm: got {a.dtype} and {b.dtype} in high precision; cast one of them")
    if bias is None:
        return torch.mm(a, b.t())
    return torch.addmm(bias.to(a.dtype), a, b.t())


def _record(
    operands: tuple[Operand, Operand], kernel: str, native: bool, padding: str, refusals: tuple[str, ...]
) -> GemmRecord:
    a, b = operands
    lhs, rhs = (str(t.spec) if isinstance(t, QuantizedTensor) else _short(t.dtype) for t in operands)
    quantized = isinstance(a, QuantizedTensor)
    return GemmRecord(lhs, rhs, a.shape[0], b.shape[0], a.shape[1], kernel, quantized, native, padding, refusals)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Inside the operations dtypes are explicit: torch.autocast must not turn the fp32 accumulation into BF16."""
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _quantize(x: Tensor, spec: QuantizationSpec, scale: Tensor | None) -> reference.Cast:
    x = x.detach()  # codes carry no gradient
    for kernel in _casts(x.device):
        if kernel.supports_quantize(x, spec, scale) is None:
            break
    with _no_autocast(x.device):
        return kernel.quantize(x, spec, scale)


@functools.lru_cache(maxsize=256)
def _spec_from_key(key: str) -> QuantizationSpec:
    return QuantizationSpec.from_dict(json.loads(key))


@torch.library.custom_op("ottava::quantize", mutates_args=())
def _quantize_op(x: Tensor, spec: str, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    data, scale_inv, amax = _quantize(x, _spec_from_key(spec), scale)
    like = _codes_like(x, data.dtype, "meta")  # the strides that the fake kernel promised
    if data.stride() != like.stride():
        data = torch.empty_strided(data.shape, like.stride(), dtype=data.dtype, device=data.device).copy_(data)
    return data, scale_inv, amax


def _codes_like(x: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """An accelerator's GEMMs want contiguous codes, and Triton writes such; the reference keeps the strides of x."""
    if x.device.type == "cpu":
        return torch.empty_like(x, dtype=dtype, device=device)
    return torch.empty(x.shape, dtype=dtype, device=device)


@_quantize_op.register_fake
def _(x: Tensor, spec: str, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    parsed = _spec_from_key(spec)
    grid = parsed.granularity.grid_shape((x.shape[0], x.shape[1]))
    data = _codes_like(x, parsed.format.storage_dtype, x.device)
    return data, x.new_empty(grid, dtype=torch.float32), x.new_empty(grid, dtype=torch.float32)


@torch.compiler.assume_constant_result
def _both_of(spec: str, spec_t: str) -> tuple[bool, bool]:
    """Whether the kernels make both casts, and whether these have one scale for each element."""
    cells = _spec_from_key(spec), _spec_from_key(spec_t)
    return not any(map(triton_quantize.refuses, cells)), triton_quantize.shared(*cells)


def _reads_once(x: Tensor) -> bool:
    """Whether compiled code asks for x and x.T at once; on a CPU it casts as eager code does there."""
    return x.device.type == "cuda"


@torch.library.custom_op("ottava::quantize_both", mutates_args=())
def _quantize_both_op(
    x: Tensor, spec: str, spec_t: str, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(codes, scale_inv, amax) of x, (codes, scale_inv) of x.T; the last is empty where they share their scales."""
    row_spec, col_spec = _spec_from_key(spec), _spec_from_key(spec_t)
    x = x.detach()
    if any(triton_quantize.supports_quantize(x, s, scale) for s in (row_spec, col_spec)):
        row, col = _quantize(x, row_spec, scale), _quantize(x.t(), col_spec, scale)  # a GPU without Triton: two casts
    else:
        both = triton_quantize.quantize_both(x, row_spec, col_spec, scale)
        assert both[0] is not None
        assert both[1] is not None
        row, col = both[0], both[1]
    own = x.new_empty(0, dtype=torch.float32) if triton_quantize.shared(row_spec, col_spec) else col.scale_inv
    return row.data.contiguous(), row.scale_inv, row.amax, col.data.contiguous(), own


@_quantize_both_op.register_fake
def _(x: Tensor, spec: str, spec_t: str, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    row_spec, col_spec = _spec_from_key(spec), _spec_from_key(spec_t)
    rows, cols = x.shape
    grid, grid_t = row_spec.granularity.grid_shape((rows, cols)), col_spec.granularity.grid_shape((cols, rows))
    own = (0,) if triton_quantize.shared(row_spec, col_spec) else grid_t
    return (
        x.new_empty((rows, cols), dtype=row_spec.format.storage_dtype),
        x.new_empty(grid, dtype=torch.float32),
        x.new_empty(grid, dtype=torch.float32),
        x.new_empty((cols, rows), dtype=col_spec.format.storage_dtype),
        x.new_empty(own, dtype=torch.float32),
    )


@torch.library.custom_op("ottava::gemm", mutates_args=())
def _gemm_op(
    a: Tensor,
    a_scale_inv: Tensor,
    a_spec: str,
    b: Tensor,
    b_scale_inv: Tensor,
    b_spec: str,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    fast_accum: bool,
) -> Tensor:
    lhs = QuantizedTensor(a, a_scale_inv, _spec_from_key(a_spec), out_dtype)
    rhs = QuantizedTensor(b, b_scale_inv, _spec_from_key(b_spec), out_dtype)
    return gemm(lhs, rhs, out_dtype=out_dtype, bias=bias, fast_accum=fast_accum)


@_gemm_op.register_fake
def _(
    a: Tensor,
    a_scale_inv: Tensor,
    a_spec: str,
    b: Tensor,
    b_scale_inv: Tensor,
    b_spec: str,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    fast_accum: bool,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)
