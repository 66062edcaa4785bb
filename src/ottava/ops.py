"""`gemm`, and the choice of the kernel that runs it; casts are in `casts`.

The first kernel of an explicit tuple that supports a call gets it, unless another was measured to be faster: by
`tune_gemm` on a GPU, once a machine on a CPU (`cpu_ranking`). `explain` lists every refusal. Nothing falls back
silently: what ran is handed to `log`, and `receipt` shows it. Inside torch.compile it is an opaque custom operator
(`ottava::gemm`), with the bits of eager code.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ottava.casts import dequantize, no_autocast, spec_from_key
from ottava.errors import unknown_name
from ottava.kernels import bf16_mm, cpu_choice, decoded, gemm_choice, native_gemm, reference, scaled_mm, triton_gemm
from ottava.kernels.custom_operator import custom_operator
from ottava.kernels.native_build import Built
from ottava.quantized_tensor import Operand, QuantizedTensor, refuse_pair
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


_LOGGER = logging.getLogger(__name__)
_WRONG = 2.0**-5  # relative error, in norm

# The order of capability; `cpu_ranking` moves what was measured to be clearly faster. On a CPU torch's scaled GEMM
# rounds more often than the others: an oracle there, not an engine, and never moved.
_CPU_KERNELS: tuple[GemmKernel, ...] = (native_gemm, bf16_mm, reference, scaled_mm)
_CPU_ENGINES: tuple[GemmKernel, ...] = (native_gemm, bf16_mm, reference)
# Triton's runs where `tune_gemm` measured it to be the fastest; unmeasured it stands behind what is known to be fast.
_ACCELERATOR_KERNELS: tuple[GemmKernel, ...] = (scaled_mm, decoded, triton_gemm, reference)


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
    out_dtype: str
    """Of the result: "bfloat16" and the like."""


Log = Callable[[GemmRecord], None]


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
        >>> from ottava import QuantizationSpec, quantize
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
        kernel, refusals = _choose(a, b, out_dtype, bias, fast_accum, backend)
        with no_autocast(a.device):
            y = kernel.gemm(a, b, out_dtype, bias, fast_accum)
        if log is not None:
            log(_record(*_words(*asked_for), kernel.NAME, kernel.NATIVE, kernel.padding(a, b), refusals, out_dtype))
        return y
    assert isinstance(a, Tensor)
    assert isinstance(b, Tensor)  # _check refused mixed pairs
    with no_autocast(a.device):
        y = _dense(a, b, bias).to(out_dtype)
    if log is not None and not torch.compiler.is_compiling():
        log(_record(*_words(*asked_for), f"torch.mm {_short(a.dtype)}", False, "", (), out_dtype))
    return y


def explain(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accum: bool = False,
) -> str:
    """Which kernel `gemm` would run on these operands, and why not the others, one a line.

    A last line tells what was measured: on a GPU by `tune_gemm` for this call, on a CPU once for all calls; the order
    follows that.

    Example:
        >>> from ottava import QuantizationSpec, quantize
        >>> from ottava.formats import E4M3
        >>> a = quantize(torch.ones(2, 2), QuantizationSpec(E4M3))
        >>> lines = explain(a, a, out_dtype=torch.float32).splitlines()  # which runs: whether a C++ compiler is there
        >>> [line.split(":")[0] for line in lines]
        ['native_gemm', 'bf16_mm', 'reference', 'scaled_mm', 'measured']
        >>> next(line for line in lines if line.startswith("bf16_mm"))
        "bf16_mm: torch's BF16 GEMM gives bfloat16 only; got torch.float32"
    """
    _check(a, b, bias)
    chosen, _ = _choose(a, b, out_dtype, bias, fast_accum, None)
    choice = gemm_choice.known(a, b, out_dtype, bias, fast_accum)
    measured = choice is not None and choice.kernel == chosen.NAME
    why_first = "was measured to be the fastest" if measured else f"comes first on {a.device.type}"
    lines = []
    for kernel in _kernels(a.device):
        reason = kernel.supports_gemm(a, b, out_dtype, bias)
        if kernel is chosen:
            lines.append(f"{kernel.NAME}: runs")
        else:
            lines.append(reason or f"{kernel.NAME}: supported, but {chosen.NAME} {why_first}")
    if choice is None and a.device.type == "cpu":
        lines.append(f"measured: {cpu_ranking()}")
    elif choice is not None or a.device.type == "cuda":
        lines.append(f"measured: {choice or 'nothing yet for this call on this device; ops.tune_gemm measures it'}")
    return "\n".join(lines)


def tune_gemm(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accum: bool = False,
    timer: gemm_choice.Timer | None = None,
    store: gemm_choice.Store | None = None,
) -> gemm_choice.Choice:
    """Times every kernel, and every configuration of one, that takes this call here, and keeps what it found on disk.

    From then on `gemm` runs the fastest for calls of these formats, sizes and dtypes. Ways whose result is off are out.

    Args:
        a, b, out_dtype, bias, fast_accum: as for `gemm`; finite numbers; zeros run faster than others.
        timer: seconds of one call; None: by CUDA events, each call with a cold L2 cache.
        store: where it is kept; None: the device's own, in the cache folder.
    Raises:
        ValueError: the operands, as `gemm`; or no timer, and they are not on a CUDA device.
        RuntimeError: not one way works.
    Edge cases: it waits for the device; not for use inside a CUDA graph or torch.compile.
    """
    _check(a, b, bias)
    if timer is None and a.device.type != "cuda":
        raise ValueError(f"tune_gemm: got operands on {a.device.type}; times are taken on cuda: move them there")
    ways = gemm_ways(a, b, out_dtype=out_dtype, bias=bias, fast_accum=fast_accum)
    truth = reference.gemm(a, b, torch.float32, bias)
    choice = gemm_choice.measure(ways, partial(_judge, truth), timer or gemm_choice.device_timer(a.device))
    call = gemm_choice.call_name(a, b, out_dtype, bias, fast_accum)
    store = gemm_choice.store(a.device) if store is None else store
    if note := store.keep(call, choice):
        _LOGGER.warning("tune_gemm: %s", note)
    return choice


def gemm_ways(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accum: bool = False,
) -> dict[str, Callable[[], Tensor]]:
    """Every kernel, and every configuration of one, that takes this call here -> the call; not the reference.

    Example:
        >>> from ottava import QuantizationSpec, quantize
        >>> from ottava.formats import E4M3
        >>> a = quantize(torch.ones(16, 16), QuantizationSpec(E4M3))
        >>> ways = gemm_ways(a, a, out_dtype=torch.bfloat16)  # which: what this torch and this machine have
        >>> all(float(run()[0, 0]) == 16 for run in ways.values())
        True
    """
    ways: dict[str, Callable[[], Tensor]] = {}
    for kernel in _kernels(a.device):
        if kernel is reference or kernel.supports_gemm(a, b, out_dtype, bias) is not None:
            continue
        if kernel is not triton_gemm:
            ways[kernel.NAME] = partial(kernel.gemm, a, b, out_dtype, bias, fast_accum)
            continue
        for config in triton_gemm.configs(a, b, out_dtype, fast_accum):
            ways[triton_gemm.way(config)] = partial(triton_gemm.run, a, b, out_dtype, bias, config)
    return ways


def _judge(truth: Tensor, y: Tensor) -> str:
    """Wrong kernels are off by whole terms; short accumulators and 16-bit outputs by far less than this."""
    error = float(torch.linalg.vector_norm(y.float() - truth) / torch.linalg.vector_norm(truth).clamp_min(1e-30))
    return "" if error < _WRONG else f"wrong results: relative error {error:.3g}"


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


def _kernels(device: torch.device) -> tuple[GemmKernel, ...]:
    if device.type != "cpu":
        return _ACCELERATOR_KERNELS
    return _in_order(_CPU_KERNELS, native_gemm.built())


@functools.lru_cache(maxsize=8)
def _in_order(kernels: tuple[GemmKernel, ...], native: Built) -> tuple[GemmKernel, ...]:
    """Those that were measured change places among themselves."""
    order = [way.split()[0] for way in _cpu_ranking(kernels, native).order]
    fastest = iter(sorted((kernel for kernel in kernels if kernel.NAME in order), key=lambda k: order.index(k.NAME)))
    return tuple(next(fastest) if kernel.NAME in order else kernel for kernel in kernels)


def cpu_ranking() -> cpu_choice.Ranking:
    """In which order kernels are tried on this CPU, measured once a machine; the native one is built for it.

    Example:
        >>> cpu_ranking().order[-1].split()[0] in ("native_gemm", "bf16_mm", "reference")
        True
    """
    return _cpu_ranking(_CPU_KERNELS, native_gemm.built())


@functools.lru_cache(maxsize=8)
def _cpu_ranking(kernels: tuple[GemmKernel, ...], native: Built) -> cpu_choice.Ranking:
    def way(kernel: GemmKernel, a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
        return kernel.gemm(a, b, torch.bfloat16, None, False)

    a, b = cpu_choice.operands(2, 2, 2)
    ways = {}
    for kernel in kernels:
        if kernel in _CPU_ENGINES and kernel.supports_gemm(a, b, torch.bfloat16, None) is None:
            level = f" {native_gemm.fastest().name}" if kernel is native_gemm else ""
            ways[f"{kernel.NAME}{level}"] = partial(way, kernel)
    return cpu_choice.rank("kernels", ways, native.key)


def _choose(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    fast_accum: bool,
    backend: str | None,
) -> tuple[GemmKernel, tuple[str, ...]]:
    kernels = _kernels(a.device)
    if backend is not None:
        named = [kernel for kernel in kernels if backend == kernel.NAME]
        if not named:
            raise ValueError(f"gemm: {unknown_name('backend', backend, [kernel.NAME for kernel in kernels])}")
        if reason := named[0].supports_gemm(a, b, out_dtype, bias):
            raise ValueError(f"gemm: backend {backend!r} was asked for, but {reason}")
        return named[0], ()
    if (choice := gemm_choice.known(a, b, out_dtype, bias, fast_accum)) is not None:
        fastest = choice.kernel
        kernels = tuple(sorted(kernels, key=lambda kernel: fastest != kernel.NAME))
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


def _words(a: Operand, b: Operand) -> tuple[str, str, torch.Size, torch.Size, bool]:
    """What `_record` says of the operands."""
    lhs, rhs = (str(t.spec) if isinstance(t, QuantizedTensor) else _short(t.dtype) for t in (a, b))
    return lhs, rhs, a.shape, b.shape, isinstance(a, QuantizedTensor)


@functools.lru_cache(maxsize=4096)  # a training step repeats that of the step before
def _record(
    lhs: str,
    rhs: str,
    a: torch.Size,
    b: torch.Size,
    quantized: bool,
    kernel: str,
    native: bool,
    padding: str,
    refusals: tuple[str, ...],
    out_dtype: torch.dtype,
) -> GemmRecord:
    return GemmRecord(lhs, rhs, a[0], b[0], a[1], kernel, quantized, native, padding, refusals, _short(out_dtype))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _promised(
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


@custom_operator(
    "gemm(Tensor a, Tensor a_scale_inv, str a_spec, Tensor b, Tensor b_scale_inv, str b_spec, ScalarType out_dtype,"
    " Tensor? bias, bool fast_accum) -> Tensor",
    _promised,
)
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
    lhs = QuantizedTensor(a, a_scale_inv, spec_from_key(a_spec), out_dtype)
    rhs = QuantizedTensor(b, b_scale_inv, spec_from_key(b_spec), out_dtype)
    kernel, _ = _choose(lhs, rhs, out_dtype, bias, fast_accum, None)  # `gemm` checked the operands while compiling
    with no_autocast(a.device):
        return kernel.gemm(lhs, rhs, out_dtype, bias, fast_accum)
