"""`gemm` and its plans. `dispatch` chooses the kernel; `quantize` holds the casts.

A plan depends on specs, dtypes, shapes and strides, not on numbers, so a layer decides once and keeps it. No GEMM falls
back silently: a plan holds the record of its kernel, `receipt` shows it, and `explain` lists every refusal. Inside
torch.compile a GEMM is an opaque custom operator (`ottava::gemm`), with the bits of eager code.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ottava.base.errors import need_type
from ottava.kernels import gemm_choice, reference, scaled_mm, torch_mm
from ottava.kernels.gate import LOWEST, PLAIN, address, custom_operator, no_autocast, refusal
from ottava.kernels.reference import block_columns
from ottava.numerics.accumulator import ACCUMULATORS, Accumulator, accumulator_from_key, get_accumulator, lost_share
from ottava.numerics.formats import dtype_name
from ottava.numerics.rounding import decode
from ottava.numerics.tensor import Operand, QuantizedTensor, refuse_pair, spec_from_key
from ottava.numerics.transforms import LowRank
from ottava.ops.dispatch import (
    BATCH_INVARIANT,
    choose_accumulating,
    choose_dense,
    choose_gemm,
    cpu_ranking,
    explain_accumulating,
    explain_dense,
    gemm_kernels,
    gemm_ways,
    made_of,
    measured,
    runner,
    told,
)
from ottava.ops.quantize import dequantize, keep_plan
from ottava.recipe import Compute, GemmRecipe

_LOGGER = logging.getLogger(__name__)
_PLAIN = frozenset(PLAIN)
_WRONG = 2.0**-5  # relative error, in norm


@dataclass(frozen=True, slots=True)
class GemmRecord:
    """The record of one GEMM that ran."""

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
    """Whether the GEMM multiplied codes; False: it emulated that."""
    padding: str
    """The zero-padded sizes; "": none."""
    refusals: tuple[str, ...]
    """Why faster kernels did not run."""
    out_dtype: str
    """dtype of the result, such as "bfloat16"."""
    accumulator: str = ""
    """The profile that was emulated; "": the device's own sums."""


Log = Callable[[GemmRecord], None]


@functools.cache
def tap() -> Any:
    """What looks at every GEMM of the process, in threads of backwards too.

    `see` is called with (plan, a, b, bias, c, y, plans of the layer or None, name) after each; None: nobody looks.
    """
    return SimpleNamespace(see=None)


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
    accumulator: Accumulator | str | None = None,
    c: Tensor | None = None,
) -> Tensor:
    """y (M, N) = a (M, K) @ b (N, K).T + c + bias, both contracted over their last dimension.

    Args:
        a, b: two matrices, both quantized or both not.
        out_dtype: of y, 16 bits or more; the GEMM rounds to it once, that of operands in high precision to theirs
            before.
        bias: (N,), of any dtype; added in fp32, before that rounding, and not rounded itself.
        fast_accum: let Hopper keep partial sums in its short accumulator.
        compute: "bf16" decodes quantized operands and multiplies in BF16.
        backend: name of a kernel; None: the first that supports the call.
        log: called with the GemmRecord (not while compiling).
        accumulator: an `Accumulator` or its name: sums of quantized operands are emulated as that tensor core makes
            them, on any device. None: the device's own.
        c: (M, N) fp32, for quantized operands: what the accumulator starts from, as in BLAS. It stands outside the
            scales: with one scale along K the accumulator starts from c / scale_inv_a / scale_inv_b, with blocks along
            K the fp32 sum of the scaled blocks starts from c. Sums in fp32 get it added, in fp32.
    Raises:
        ValueError: shapes or an out_dtype that do not fit, a pair of formats that no hardware takes, an unknown backend
            or accumulator, one that does not support the call, or an accumulator or c for operands in high precision;
            on every device alike.
    Edge cases: under a named accumulator E5M2 x E5M2 runs, too.

    Example:
        >>> from ottava import QuantizationSpec, quantize
        >>> from ottava.numerics.formats import E4M3
        >>> a, b = (quantize(torch.eye(2) * s, QuantizationSpec(E4M3)) for s in (2.0, 8.0))
        >>> gemm(a, b, out_dtype=torch.bfloat16)
        tensor([[16.,  0.],
                [ 0., 16.]], dtype=torch.bfloat16)
        >>> gemm(a, b, out_dtype=torch.float32, accumulator="hopper", c=torch.full((2, 2), 1 / 3))  # 14 bits of c
        tensor([[16.3329,  0.3333],
                [ 0.3333, 16.3329]])
    """
    profile = None if accumulator is None else get_accumulator(accumulator)
    if c is not None:
        _check_start(a, b, c, compute)
    if torch.compiler.is_compiling():
        return _compiled(a, b, out_dtype, bias, fast_accum, compute, profile, c)
    # an emulated accumulator begins with c as hardware does; other kernels take no c, and get it added to an fp32
    # result
    start = c if profile is not None and profile.emulated else None
    after = None if c is None or c is start else c.detach()  # a sum in fp32 gets c, then the bias
    settings = (fast_accum, compute, backend, profile)
    if after is None:
        plan = plan_gemm(a, b, out_dtype, bias, *settings)
        y = plan.run(a, b, bias) if start is None else plan.run(a, b, bias, start)
        if (see := tap().see) is not None:
            see(plan, a, b, bias, start, y, None, "gemm")
    else:
        plan = plan_gemm(a, b, torch.float32, None, *settings)  # fp32 and no bias: the one rounding comes behind c
        y = plan.run(a, b, None)
        # before c is added: whoever recomputes y knows the products alone
        if (see := tap().see) is not None:
            see(plan, a, b, None, None, y, None, "gemm")
        y = y + after
        y = (y if bias is None else y + bias.to(torch.float32)).to(out_dtype)
    if log is not None:
        log(plan.record)
    return y


class GemmPlan(NamedTuple):
    """How a GEMM runs: decided once for all operands of these specs, dtypes, shapes, strides and devices."""

    run: Callable[..., Tensor]
    """(a, b, bias) -> y; under an accumulator also (a, b, bias, c)."""
    record: GemmRecord
    """Its record for receipts."""
    kept: tuple[Any, ...] = ()
    """Specs of the operands: a kept plan keeps them alive, so that their `id` names them."""
    lasting: bool = True
    """Whether the plan holds for all such operands; False: it depends on numbers among the scales."""
    measured: int = 0
    """`Store.changes` of the device when the plan was made."""


def multiply(
    a: Operand | None,
    b: Operand | None,
    cells: GemmRecipe,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    plans: dict[Any, GemmPlan],
    records: dict[str, GemmRecord],
    name: str,
) -> Tensor:
    """As `gemm` under the settings of `cells`. It writes the record to records[name], but not while compiling.

    It keeps its plan in `plans` for later calls with such operands. It casts a high-precision fp32 weight to the
    activation's dtype, as torch.autocast does.
    """
    assert a is not None
    assert b is not None  # the caller asks its doors for all operands that it uses
    if cells.rhs is None and isinstance(b, QuantizedTensor):
        b = dequantize(b)  # a weight that is stored only as codes is decoded where it is read, and not before
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        data, other, specs = a.data, b.data, (id(a.spec), id(b.spec))
        profile = cells.accumulator
        held: tuple[Tensor, ...] = (data, other, a.scale_inv, b.scale_inv, data if bias is None else bias)
    elif isinstance(a, Tensor) and isinstance(b, Tensor):
        # as torch.autocast would: an fp32 weight meets activations of 16 bits
        b = b if b.dtype == a.dtype else b.to(a.dtype)
        data, other, specs, held = a, b, (0, 0), (a, b, a if bias is None else bias)
        profile = None  # a debugger may have decoded the operands
    else:
        raise ValueError(f"gemm: {_refused(a, b, None)}")
    if torch.compiler.is_compiling():
        return _compiled(a, b, out_dtype, bias, cells.fast_accum, cells.compute, profile)
    backend = BATCH_INVARIANT.NAME if cells.batch_invariant else None
    plan: GemmPlan | None = None
    key: tuple[Any, ...] = ()
    try:
        layout = (data.dtype, data.shape, data.stride(), other.dtype, other.shape, other.stride(), data.device)
        # the gate's look at all tensors at once; of what has no address no plan is kept
        low = min(map(address, held)) if set(map(type, held)) <= _PLAIN else 0
        plain = low > LOWEST or (low > 0 and refusal(*held) is None)
        added = None if bias is None else bias.dtype
        # specs by `id`: hashing two of them takes longer than the rest of this function, and a kept plan keeps them
        # alive
        key = (specs, layout, plain, out_dtype, added, cells.fast_accum, cells.compute, id(profile), backend)
        plan = plans.get(key) if plain else None
    except RuntimeError:  # a tensor has no strides or no memory
        plain = False
    # tune_gemm may have measured since: the plan of before would run on
    if plan is None or (data.is_cuda and plan.measured != gemm_choice.store(data.device).changes):
        plan = plan_gemm(a, b, out_dtype, bias, cells.fast_accum, cells.compute, backend, profile)
        quantized = isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor) and cells.compute == "native"
        # the hint once for each K: a sum's loss depends on its length
        if plain and quantized and all(kept.record.k != plan.record.k for kept in plans.values()):
            short_sums(a, b, profile, cells.fast_accum and plan.record.kernel == scaled_mm.NAME)  # type: ignore[arg-type]
        if plan.lasting and plain:
            keep_plan(plans, key, plan)
    records[name] = plan.record
    y = plan.run(a, b, bias)
    # asked at each GEMM, and not bound when the plan is kept: an audit begins and ends between two steps
    if (see := tap().see) is not None:
        see(plan, a, b, bias, None, y, plans, name)
    return y


def plan_gemm(
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accum: bool = False,
    compute: Compute = "native",
    backend: str | None = None,
    accumulator: Accumulator | None = None,
) -> GemmPlan:
    """Decides how `gemm` multiplies operands like these; arguments and errors as there."""
    _check(a, b, bias, accumulator, compute)
    if not out_dtype.is_floating_point or out_dtype.itemsize < 2:
        raise ValueError(f"gemm: got out_dtype {out_dtype}; needs a float of 16 bits or more, such as torch.bfloat16")
    if (rest := rests(a, b)) is not None:
        # the product of the rests stays in fp32 until the parts are added: one rounding
        plan = plan_gemm(*rest, torch.float32, None, fast_accum, compute, backend, accumulator)
        record = replace(plan.record, out_dtype=dtype_name(out_dtype))
        return plan._replace(run=with_parts(plan.run, out_dtype), record=record)
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor) and compute == "native":
        if accumulator is not None:
            if accumulator.emulated:
                # its own table: a device that has the accumulator is not asked
                emulates, why_not = choose_accumulating(a, b, out_dtype, accumulator, backend)
                summed = emulates.plan_accumulate(a, b, out_dtype, bias, accumulator)

                def emulate(a: Any, b: Any, bias: Tensor | None, c: Tensor | None = None) -> Tensor:
                    with no_autocast(a.device):
                        return summed(a, b, bias, c)

                record = _record(a, b, emulates.NAME, emulates.NATIVE, "", why_not, out_dtype, accumulator)
                return GemmPlan(emulate, record, (a.spec, b.spec, accumulator))
            backend = backend or (None if a.device.type == "cpu" else reference.NAME)  # tensor cores do not sum in fp32
        kernel, refusals, lasting = choose_gemm(a, b, out_dtype, bias, fast_accum, backend=backend)
        pads = getattr(kernel, "padding", None)
        padded = "" if pads is None else pads(a, b)
        # on a CPU one measurement holds for all calls, and for the whole process
        known = gemm_choice.store(a.device).changes if a.device.type == "cuda" else 0
        return GemmPlan(
            runner(kernel, a, b, out_dtype, bias, fast_accum),
            _record(a, b, kernel.NAME, kernel.NATIVE, padded, refusals, out_dtype, accumulator),
            (a.spec, b.spec, accumulator),
            lasting,
            known,
        )
    specs = (a.spec, b.spec) if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor) else ()
    x, w = _in_high_precision(a, b)
    dense, refusals = choose_dense(x, w, backend)
    multiply = dense.plan_dense(x, w, bias)

    def run(a: Any, b: Any, bias: Tensor | None) -> Tensor:
        if specs:
            a, b = _in_high_precision(a, b)
        with no_autocast(a.device):
            return multiply(a, b, bias).to(out_dtype)

    record = _record(a, b, f"{dense.NAME} {dtype_name(x.dtype)}", False, "", refusals, out_dtype)
    return GemmPlan(run, record, specs)


def explain(
    a: Operand,
    b: Operand,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accum: bool = False,
    accumulator: Accumulator | str | None = None,
) -> str:
    """The kernel that `gemm` would run on these operands, and why not the others, one per line.

    A last line gives the measurement that decides the order: on a GPU that of `tune_gemm` for this call, on a CPU one
    for all calls; or the accumulator that is emulated. Operands in high precision work, too.

    Example:
        >>> from ottava import QuantizationSpec, quantize
        >>> from ottava.numerics.formats import E4M3
        >>> explain(torch.ones(2, 2), torch.ones(2, 2), out_dtype=torch.float32)
        'torch.mm: runs'
        >>> a = quantize(torch.ones(2, 2), QuantizationSpec(E4M3))
        >>> lines = explain(a, a, out_dtype=torch.float32).splitlines()  # the one that runs depends on a C++ compiler
        >>> sorted(line.split(":")[0] for line in lines)
        ['bf16_mm', 'measured', 'native_decoded', 'native_gemm', 'reference', 'scaled_mm']
        >>> next(line for line in lines if line.startswith("bf16_mm"))
        "bf16_mm: torch's BF16 GEMM gives bfloat16 only; got torch.float32"
    """
    profile = None if accumulator is None else get_accumulator(accumulator)
    _check(a, b, bias, profile)
    if not (isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor)):
        return explain_dense(*_in_high_precision(a, b))
    if profile is not None and profile.emulated:
        return explain_accumulating(a, b, out_dtype, profile)
    # as in `plan_gemm`: a profile of fp32 sums
    named = reference.NAME if profile is not None and a.device.type != "cpu" else None
    chosen = choose_gemm(a, b, out_dtype, bias, fast_accum, backend=named)[0]
    choice = measured(a, b, out_dtype, bias, fast_accum)
    fastest = choice is not None and choice.kernel == chosen.NAME
    why_first = "was measured to be the fastest" if fastest else f"comes first on {a.device.type}"
    kernels = gemm_kernels(a.device)
    lines = told(kernels, chosen, lambda kernel: kernel.supports_gemm(a, b, out_dtype, bias), why_first)
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
    """Times every kernel that takes this call, in all its configurations, and keeps the times on disk.

    From then on `gemm` runs the fastest one for calls of these formats, sizes and dtypes. Kernels with wrong results
    are out, also on the magnitudes of a and b: sums of numbers of one sign show what a short accumulator loses. With
    fast_accum it may lose what Hopper's loses; the choice tells how much.

    Args:
        a, b, out_dtype, bias, fast_accum: as for `gemm`; take finite numbers, not zeros, which run faster.
        timer: seconds of one call; None: by CUDA events, each call with a cold L2 cache.
        store: keeps the times; None: the device's store, in the cache folder.
    Raises:
        ValueError: as `gemm`; or the operands are not on a CUDA device, and there is no timer.
        RuntimeError: no kernel works.
    Edge cases: it waits for the device, so it cannot run inside a CUDA graph or torch.compile.
    """
    _check(a, b, bias)
    if timer is None and a.device.type != "cuda":
        raise ValueError(f"tune_gemm: got operands on {a.device.type}; times are taken on cuda: move them there")
    call = partial(gemm_ways, out_dtype=out_dtype, bias=bias, fast_accum=fast_accum)
    # random signs cancel, and hide what a short accumulator loses
    pairs = (a, b), (a.magnitudes(), b.magnitudes())
    (ways, biased), (truth, biased_truth) = (
        [call(*pair) for pair in pairs],
        [reference.gemm(*pair, torch.float32, bias) for pair in pairs],
    )
    # fast accumulation was permitted to lose as much as Hopper's does, and no more
    allowed = _WRONG + (lost_share(a.shape[1], 1.0, "hopper") if fast_accum else 0.0)
    lost: dict[str, float] = {}

    def judge(way: str, y: Tensor) -> str:
        """A wrong kernel errs by whole terms, a short accumulator far less unless numbers have one sign."""
        if (error := _error(truth, y)) >= _WRONG:
            return f"wrong results: relative error {error:.3g}"
        lost[way] = _error(biased_truth, biased[way]())
        return "" if lost[way] < allowed else f"wrong results on magnitudes: relative error {lost[way]:.3g}"

    choice = gemm_choice.measure(ways, judge, timer or gemm_choice.device_timer(a.device))
    choice = choice._replace(made_of=made_of(a.device), biased={way: lost[way] for way in choice.milliseconds})
    name = gemm_choice.call_name(a, b, out_dtype, bias, fast_accum)
    store = gemm_choice.store(a.device) if store is None else store
    if note := store.keep(name, choice):
        _LOGGER.warning("tune_gemm: %s", note)
    return choice


def _error(truth: Tensor, y: Tensor) -> float:
    """Relative, in norm."""
    return float(torch.linalg.vector_norm(y.float() - truth) / torch.linalg.vector_norm(truth).clamp_min(1e-30))


def _check_start(a: Operand, b: Operand, c: Tensor, compute: Compute) -> None:
    if not (isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor)) or compute != "native":
        raise ValueError("gemm: c starts the accumulator of quantized operands; add it to the result of other GEMMs")
    need_type("gemm: c", c, Tensor)
    shape = (a.shape[0], b.shape[0])
    if tuple(c.shape) != shape or c.dtype != torch.float32 or c.device != a.device:
        got = f"{tuple(c.shape)} in {dtype_name(c.dtype)} on {c.device}"
        raise ValueError(f"gemm: got c {got}; needs {shape} in float32 on {a.device}")


def _check(
    a: Operand, b: Operand, bias: Tensor | None, accumulator: Accumulator | None = None, compute: Compute = "native"
) -> None:
    rows, cols = a.shape, b.shape
    if len(rows) != 2 or len(cols) != 2 or rows[1] != cols[1]:
        raise ValueError(
            f"gemm: got {_shapes(a, b)}; needs (M, K) and (N, K): both are contracted over their last dimension"
        )
    if bias is not None and tuple(bias.shape) != (cols[0],):
        raise ValueError(f"gemm: got bias {tuple(bias.shape)} for {_shapes(a, b)}; needs ({cols[0]},)")
    if reason := _refused(a, b, accumulator):
        raise ValueError(f"gemm: {reason}")
    if accumulator is not None and not (isinstance(a, QuantizedTensor) and compute == "native"):
        raise ValueError(
            f"gemm: accumulator {accumulator.name!r} is that of instructions on FP8 codes; got operands in high "
            "precision. Quantize both, or leave the accumulator out"
        )


def _refused(a: Operand, b: Operand, accumulator: Accumulator | None) -> str | None:
    lhs, rhs = (t.spec if isinstance(t, QuantizedTensor) else None for t in (a, b))
    reason = refuse_pair(lhs, rhs, accumulator)
    return f"{lhs or 'high precision'} x {rhs or 'high precision'}: {reason}" if reason else None


def _shapes(a: Operand, b: Operand) -> str:
    return f"a {tuple(a.shape)} and b {tuple(b.shape)}"


def _in_high_precision(a: Operand, b: Operand) -> tuple[Tensor, Tensor]:
    x, w = (dequantize(t, torch.bfloat16) if isinstance(t, QuantizedTensor) else t for t in (a, b))
    if x.dtype != w.dtype:
        raise ValueError(f"gemm: got {x.dtype} and {w.dtype} in high precision; cast one of them")
    return x, w


def _record(
    a: Operand,
    b: Operand,
    kernel: str,
    native: bool,
    padding: str,
    refusals: tuple[str, ...],
    out_dtype: torch.dtype,
    accumulator: Accumulator | None = None,
) -> GemmRecord:
    lhs, rhs = (str(t.spec) if isinstance(t, QuantizedTensor) else dtype_name(t.dtype) for t in (a, b))
    (m, k), n, quantized = a.shape, b.shape[0], isinstance(a, QuantizedTensor)
    profile = "" if accumulator is None else accumulator.name
    return GemmRecord(lhs, rhs, m, n, k, kernel, quantized, native, padding, refusals, dtype_name(out_dtype), profile)


def _promised(
    a: Tensor, a_scale: Tensor, a_spec: str, b: Tensor, b_scale: Tensor, b_spec: str, out: torch.dtype, *rest: object
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out)


@custom_operator(
    "gemm(Tensor a, Tensor a_scale_inv, str a_spec, Tensor b, Tensor b_scale_inv, str b_spec, ScalarType out_dtype,"
    " Tensor? bias, bool fast_accum, str accumulator='', Tensor? c=None, Tensor? a_aside=None, Tensor? b_aside=None,"
    " str compute='native') -> Tensor",
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
    accumulator: str = "",
    c: Tensor | None = None,
    a_aside: Tensor | None = None,
    b_aside: Tensor | None = None,
    compute: Compute = "native",
) -> Tensor:
    lhs = QuantizedTensor(a, a_scale_inv, spec_from_key(a_spec), out_dtype, aside=a_aside)
    rhs = QuantizedTensor(b, b_scale_inv, spec_from_key(b_spec), out_dtype, aside=b_aside)
    profile, settings = accumulator_from_key(accumulator), {"fast_accum": fast_accum, "compute": compute, "c": c}
    return gemm(lhs, rhs, out_dtype=out_dtype, bias=bias, accumulator=profile, **settings)  # type: ignore[arg-type]


def _compiled(
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    fast_accum: bool,
    compute: Compute,
    accumulator: Accumulator | None = None,
    c: Tensor | None = None,
) -> Tensor:
    _check(a, b, bias, accumulator, compute)
    # the operator adds the parts
    apart = any(isinstance(t, QuantizedTensor) and t.aside is not None for t in (a, b))
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor) and (compute == "native" or apart):
        return torch.ops.ottava.gemm(  # type: ignore[no-any-return]
            *(a.data, a.scale_inv, a.spec.key, b.data, b.scale_inv, b.spec.key, out_dtype, bias, fast_accum),
            "" if accumulator is None else accumulator.key,
            *(c, a.aside, b.aside, compute),
        )
    x, w = _in_high_precision(a, b)
    with no_autocast(x.device):
        return torch_mm.dense(x, w, bias).to(out_dtype)  # Inductor fuses around torch's own GEMM, and not around ours


# --- what transforms have set aside of two operands, added to their product in high precision ---


def rests(a: Operand, b: Operand) -> tuple[Operand, Operand] | None:
    """The operands without the parts that were set aside; None if nothing was."""
    if _part(a) is None and _part(b) is None:
        return None
    one, other = (replace(t, aside=None) if isinstance(t, QuantizedTensor) else t for t in (a, b))
    return one, other


def with_parts(run: Callable[..., Tensor], out_dtype: torch.dtype) -> Callable[..., Tensor]:
    """A GEMM of rests, (a, b, bias) -> fp32 (M, N), as one of whole operands: parts and bias are added in fp32, before
    the one rounding to out_dtype."""

    def whole_product(a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None, c: Tensor | None = None) -> Tensor:
        with no_autocast(a.device):
            y = run(a, b, None) if c is None else run(a, b, None, c)  # the bias waits until the parts are there
            y = _added(y, a, b)
            return (y if bias is None else y + bias.to(torch.float32)).to(out_dtype)

    return whole_product


def whole(x_q: QuantizedTensor, rest: Tensor | None = None) -> Tensor:
    """fp32: the decoded codes with the part that was set aside; products of such matrices are those of the GEMM.

    Args:
        rest: in place of the decoded codes, such as the tensor before the cast (`QuantizedTensor.transformed`).

    Example:
        >>> import ottava
        >>> spec = ottava.QuantizationSpec(ottava.E4M3, transform="mean")
        >>> whole(ottava.quantize(torch.tensor([[300.1], [302.1]]), spec))
        tensor([[300.1000],
                [302.1000]])
    """
    rest = x_q.dequantize(torch.float32) if rest is None else rest.to(torch.float32)
    part = _part(x_q)
    return rest if part is None else rest + part.left @ part.right.t()


def _added(y: Tensor, a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
    """The product of two rests with what it lacks. Rests without a mean along K give no mixed products: what would come
    of them is errors of the casts."""
    one, other = _part(a), _part(b)
    if one is not None and other is not None:
        # (M, r) @ (r, K) @ (K, s) @ (s, N), from the inside: r and s are 1 for a mean, and K is the long side
        y = y + one.left @ _thin(one.right.t(), other.right) @ other.left.t()
        # both rests have no mean along K, so a mean times a rest is zero but for rounding
        if _centred(a) and _centred(b):
            return y
    if one is not None:
        # the part of a meets the rest of b as it was cast: what b lost in its cast is lost in this product, too
        y = y + one.left @ _thin(dequantize(b, torch.float32), one.right).t()
    if other is not None:
        y = y + _thin(dequantize(a, torch.float32), other.right) @ other.left.t()
    return y


def _thin(x: Tensor, columns: Tensor) -> Tensor:
    """x (M, K) @ columns (K, r) for a small r. MKL's product of a matrix and a vector depends on threads on some CPUs;
    torch's sums over the last dimension depend on them on none."""
    if not x.is_cpu or columns.shape[1] == 1:
        return (x.unsqueeze(2) * columns).sum(1) if x.is_cpu else x @ columns
    return torch.cat([(x.unsqueeze(2) * column).sum(1) for column in columns.split(1, 1)], 1)


def _centred(operand: QuantizedTensor) -> bool:
    return operand.spec.transform is not None and operand.spec.transform.centred


def _part(operand: Any) -> LowRank | None:
    if not isinstance(operand, QuantizedTensor) or operand.spec.transform is None or operand.aside is None:
        return None
    return operand.spec.transform.low_rank(operand.aside, (operand.shape[0], operand.shape[1]))


# --- a hint, once: biased sums lose magnitude in short accumulators. It is no error, and nothing else would show it ---

_LONG_SUM = 1024  # products in a sum: below, no accumulator loses 2 %
_SAMPLE = 64  # rows of each operand whose cosines tell how much a GEMM's sums are biased
_LOST = 0.01  # the share of a sum that is worth a hint


def short_sums(a: QuantizedTensor, b: QuantizedTensor, accumulator: Accumulator | None, fast: bool) -> None:
    """Warns of a GEMM whose biased sums lose a percent or more in a short accumulator; once for each K and share.

    Args:
        accumulator: the profile that is emulated; None: the device's own sums.
        fast: whether those are a Hopper's fast ones.
    """
    k = a.shape[1]
    chain = block_columns(a.spec.granularity, b.spec.granularity, k)
    # a short accumulator of the device: that of FP8 on Ada and Hopper
    short = fast and a.data.is_cuda and torch.cuda.get_device_capability(a.device) in ((8, 9), (9, 0))
    if chain < _LONG_SUM or (accumulator is None and not short):
        return
    profile = ACCUMULATORS["hopper"] if accumulator is None else accumulator
    # as long as fp32; or nobody may read a number now
    if profile.kept_bits >= 23 or (a.data.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    share = lost_share(chain, _alignment(a, b), profile)
    if share >= _LOST:
        warnings.warn(
            f"a GEMM over K = {k:,} keeps its sums in a short accumulator ({profile.name}), and its operands are "
            f"biased: sums lose about {float(f'{share:.0e}'):.0%} of their magnitude. Give this GEMM fast_accum=False, "
            "or a recipe with blocks along K; docs/accumulation.md tells more",
            stacklevel=2,
        )


@torch.no_grad()
def _alignment(a: QuantizedTensor, b: QuantizedTensor) -> float:
    """The mean magnitude of the cosines between some rows of two operands, larger ones weigh more."""
    sides = []
    for side in (a, b):
        # rows from all over the matrix: neighbours are often alike
        rows = slice(None, None, -(-side.shape[0] // _SAMPLE))
        numbers = side.spec.granularity.expand(side.scale_inv, (side.shape[0], side.shape[1]))
        numbers = numbers.expand(*side.shape)[rows]
        numbers = numbers * decode(side.data[rows], side.spec.format)
        sides.append(torch.nn.functional.normalize(numbers, dim=1))
    # a sum whose terms have one sign has a cosine near 1; such sums lose most
    cosines = (sides[0] @ sides[1].t()).abs().nan_to_num(0.0)
    # weighted by themselves: the few sums of one sign are those that lose
    return float(cosines.square().sum() / cosines.sum().clamp_min(1e-30))
