"""Casts to FP8 and back, and the choice of their kernel.

The first kernel of an explicit tuple that supports a cast runs it; `explain_quantize` lists every refusal. All kernels
give the reference's bits. The choice depends on dtype, shape and strides, not on numbers, so a door decides once and
keeps the `CastPlan`. Inside torch.compile casts are opaque custom operators (`ottava::quantize`,
`ottava::quantize_both`), with the bits of eager code: `cast_in_graph` calls them. Specs and the type of device decide
which one while torch traces, so a layer stays in one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ottava.kernels import reference
from ottava.kernels.gate import LOWEST, PLAIN, address, constant_in_graph, custom_operator, no_autocast
from ottava.kernels.native import quantize as native_quantize
from ottava.kernels.triton import quantize as triton_quantize
from ottava.kernels.triton.quantize import UnmadeRows
from ottava.numerics.scaling import read_scales
from ottava.numerics.tensor import Beside, Both, Operand, QuantizationSpec, QuantizedTensor, spec_from_key
from ottava.numerics.transforms import ONE_RANK, OneRank, Transform


def cast_in_graph(
    x: Tensor, spec: QuantizationSpec | None, spec_t: QuantizationSpec | None, scale: Tensor | None, beside: Beside
) -> Both:
    """As `ops.quantize.cast_both`, of opaque operators."""
    known = spec or spec_t
    assert known is not None
    if (spec is not None and spec.transform) or (spec_t is not None and spec_t.transform):
        of_x = None if spec is None else _behind(x, spec, beside[0])
        of_x_t = None if spec_t is None else _behind(x.t(), spec_t, beside[1])
        return Both(of_x, of_x_t, None)
    if spec is not None and spec_t is not None:
        # decided while torch traces, from strings: a graph has one operator or two, and no branch
        at_once, one_scale = _both_of(_casts_as(x), spec.key, spec_t.key)
        if at_once:
            data, scale_inv, amax, data_t, own = torch.ops.ottava.quantize_both(x, spec.key, spec_t.key, scale)
            col = QuantizedTensor(data_t, scale_inv.t() if one_scale else own, spec_t, x.dtype)
            return Both(QuantizedTensor(data, scale_inv, spec, x.dtype), col, amax)
    if known.granularity.transposes and (spec is None or spec_t is None or spec == spec_t):
        data, scale_inv, amax = torch.ops.ottava.quantize(x, known.key, scale)
        x_q = QuantizedTensor(data, scale_inv, known, x.dtype)
        return Both(None if spec is None else x_q, None if spec_t is None else x_q.t(), amax)
    row = col_alone = seen = None
    if spec is not None:
        data, scale_inv, seen = torch.ops.ottava.quantize(x, spec.key, scale)
        row = QuantizedTensor(data, scale_inv, spec, x.dtype)
    if spec_t is not None:
        data, scale_inv, amax = torch.ops.ottava.quantize(x.t(), spec_t.key, scale)
        col_alone = QuantizedTensor(data, scale_inv, spec_t, x.dtype)
        seen = amax if seen is None else seen
    return Both(row, col_alone, seen)


def _behind(x: Tensor, spec: QuantizationSpec, other: Operand | None) -> QuantizedTensor:
    """A cast behind the transform of its spec, if there is one."""
    if spec.transform is None:
        data, scale_inv, _ = torch.ops.ottava.quantize(x, spec.key, None)
        return QuantizedTensor(data, scale_inv, spec, x.dtype)
    met = other.aside if isinstance(other, QuantizedTensor) and spec.transform.paired else None
    # two casts that draw are two results, whatever their inputs; without the tag Inductor would merge them
    operator = torch.ops.ottava.quantize_drawn if _draws(spec.key) else torch.ops.ottava.quantize_behind
    data, scale_inv, aside = operator(x, spec.key, met)
    return QuantizedTensor(data, scale_inv, spec, x.dtype, aside=None if aside.dim() == 1 else aside)


@constant_in_graph
def _draws(spec: str) -> bool:
    """Whether a cast takes numbers from torch's generator, so that compiled code may not merge two of them."""
    parsed = spec_from_key(spec)
    drawn = parsed.rounding == "stochastic" or parsed.block_scale == "ms_eden"
    return drawn or (parsed.transform is not None and parsed.transform.draws)


def _casts_as(x: Tensor) -> str:
    """The type of device; it decides how compiled code casts x and x.T."""
    return x.device.type


@constant_in_graph
def _both_of(device: str, spec: str, spec_t: str) -> tuple[bool, bool]:
    """Whether compiled code calls one operator for both casts, and whether both share each element's scale."""
    cells = spec_from_key(spec), spec_from_key(spec_t)
    if device == "cpu":
        return not (cells[0] == cells[1] and cells[0].granularity.transposes), False
    return not any(map(triton_quantize.refuses, cells)), triton_quantize.shared(*cells)


class QuantizeKernel(Protocol):
    """The interface of a kernel file for casts.

    It also has `plan_quantize`, (x, spec) -> ((x, scale, staged) -> reference.Cast) for all x like this one, or
    `quantize`, (x, spec, scale) -> reference.Cast: codes, scale_inv, amax.
    """

    NAME: str

    def supports_quantize(self, x: Tensor, spec: QuantizationSpec, scale: Tensor | None) -> str | None:
        """None, or the reason why not."""


ApplyTransform = Callable[[Tensor, Tensor | None], Tensor]
"""(x, aside) -> the matrix to cast in place of x."""
Plan = TypeVar("Plan")
MOST_PLANS = 32
"""The largest number of plans of one door or one layer."""

_CPU_CASTS: tuple[QuantizeKernel, ...] = (native_quantize, reference)
_ACCELERATOR_CASTS: tuple[QuantizeKernel, ...] = (triton_quantize, reference)


Run = Callable[..., Both]
"""(x, scale, staged) -> its casts."""


class CastPlan(NamedTuple):
    """How x and x.T are cast: decided once for all matrices of a dtype, shape, strides and device."""

    run: Run
    """Makes the casts."""
    kernel: str
    """Name of the kernel that runs."""
    refusals: tuple[str, ...]
    """Why the kernels before it do not."""
    specs: tuple[QuantizationSpec | None, QuantizationSpec | None]
    """Of x and x.T. A kept plan keeps them alive, so their `id` names them."""
    transforms: bool = False
    """Whether `run` takes a fourth argument: the operands that x and x.T will meet, if those were cast before."""


def quantize(
    x: Tensor, spec: QuantizationSpec, *, scale: Tensor | None = None, beside: Operand | None = None
) -> QuantizedTensor:
    """Casts a matrix to `spec`.

    Args:
        x: (R, C); float32, bfloat16 or float16; any strides, also empty.
        scale: fp32, one entry, the factor of x before the cast (delayed scaling); None: each block's current scale.
        beside: the other operand of the GEMM, if it was cast before; a transform with fresh signs or with factors takes
            them from there.
    Returns:
        QuantizedTensor: .data codes (R, C) | .scale_inv fp32, one entry per block | .dequantize().
    Raises:
        TypeError: dtype.  ValueError: not a matrix.
    Edge cases: zero blocks have scale 1; NaN stays NaN, and infinities become NaN: in the codes, or in the scale of the
        block where the format has no NaN (`scaling.with_nan`). Finite numbers saturate.

    Example:
        >>> from ottava.numerics.formats import E4M3
        >>> x_q = quantize(torch.tensor([[0.5, -3.0], [14.0, 7.0]]), QuantizationSpec(E4M3))
        >>> x_q.scale_inv, x_q.data.float()                                # 14 / 448, and the codes' numbers
        (tensor([[0.0312]]), tensor([[ 16., -96.],
                [448., 224.]]))
    """
    x_q = cast_both(x, spec, None, scale=scale, beside=(beside, None)).row
    assert x_q is not None  # spec is not None
    return x_q


def cast_both(
    x: Tensor | UnmadeRows,
    spec: QuantizationSpec | None,
    spec_t: QuantizationSpec | None,
    *,
    scale: Tensor | None = None,
    staged: Tensor | None = None,
    plans: dict[Any, CastPlan] | None = None,
    beside: Beside = (None, None),
) -> Both:
    """x cast to spec and x.T cast to spec_t, from one reading of x where a kernel can.

    Args:
        x: (R, C), or rows that Triton's kernels make while they cast them (`refuse_unmade` says None).
        spec, spec_t: None for a cast that is not wanted, not both.
        scale: as for `quantize`, one for both; 0 takes the current scale.
        staged: fp32 (3,), or (4,) with a 0, of a door: its amax since the last boundary. Some kernels raise it to this
            cast's amax themselves, and then return no amax.
        plans: the caller's kept plans. None: decide anew.
        beside: the operands that x and x.T meet, for transforms.
    """
    if isinstance(x, UnmadeRows):
        return _on_accelerator(x, spec, spec_t, scale, staged)(x, scale, staged)
    if torch.compiler.is_compiling():
        return cast_in_graph(x, spec, spec_t, scale, beside)
    plan = key = None
    if plans is not None and type(x) in PLAIN:
        try:
            # where a tensor lies decides the kernel, which numbers it holds never does
            lies = (x.dtype, x.shape, x.stride(), x.device, address(x) > LOWEST, x.is_neg())
            key = (id(spec), id(spec_t), lies, scale is None, 0 if staged is None else staged.numel())
            plan = plans.get(key)
        except RuntimeError:  # it has no strides or no memory
            key = None
    if plan is None:
        plan = plan_casts(x, spec, spec_t, scale=scale, staged=staged)
        if plans is not None and key is not None:
            keep_plan(plans, key, plan)
    return plan.run(x, scale, staged, beside) if plan.transforms else plan.run(x, scale, staged)


def keep_plan(plans: dict[Any, Plan], key: object, plan: Plan) -> None:
    """Adds a plan to those of a door or a layer, MOST_PLANS at most."""
    if len(plans) >= MOST_PLANS:
        plans.clear()  # a length that changes with every batch would fill the memory
    plans[key] = plan


def plan_casts(
    x: Tensor,
    spec: QuantizationSpec | None,
    spec_t: QuantizationSpec | None = None,
    *,
    scale: Tensor | None = None,
    staged: Tensor | None = None,
) -> CastPlan:
    """Chooses the kernel that casts matrices like x to spec, and their transposes to spec_t; arguments of `cast_both`.

    Raises:
        TypeError: dtype.  ValueError: not a matrix.
    """
    x = x.detach()  # codes carry no gradient
    reference.check_matrix(x)
    if scale is not None and (scale.numel() != 1 or scale.device != x.device):
        raise ValueError(f"quantize: got a scale {tuple(scale.shape)} on {scale.device}; needs one entry on {x.device}")
    known = spec or spec_t
    assert known is not None
    if (spec is not None and spec.transform) or (spec_t is not None and spec_t.transform):
        return _transformed(x, spec, spec_t)  # first: every kernel below casts what the transform has made
    # one cast serves both where blocks of x are blocks of x.T: a tensor, or squares
    alike = spec is None or spec_t is None or spec == spec_t
    if native_quantize not in _casts(x) and not any(
        triton_quantize.supports_quantize(x, s, scale) for s in (spec, spec_t) if s
    ):
        by_triton = _on_accelerator(x, spec, spec_t, scale, staged)
        return CastPlan(by_triton, triton_quantize.NAME, (), (spec, spec_t))
    if alike and known.granularity.transposes:
        return _one_for_both(x, spec, spec_t, scale)
    if spec is None or spec_t is None:
        return _alone(x, spec, spec_t, scale)
    # a predicted scale is one for the tensor, and its codes serve x.T by their transpose: no kernel for two
    natively = scale is None and staged is None and native_quantize in _casts(x)
    if natively and native_quantize.supports_quantize_both(x, spec, spec_t) is None:
        return CastPlan(_both_natively(x, spec, spec_t), native_quantize.NAME, (), (spec, spec_t))
    row, col = _alone(x, spec, None, scale), _alone(x, None, spec_t, scale)

    def run(x: Tensor, scale: Tensor | None, staged: Tensor | None) -> Both:
        first = row.run(x, scale, staged)
        return first._replace(col=col.run(x, scale, staged).col)

    return CastPlan(run, row.kernel, row.refusals, (spec, spec_t))


def _one_for_both(
    x: Tensor, spec: QuantizationSpec | None, spec_t: QuantizationSpec | None, scale: Tensor | None
) -> CastPlan:
    """x and x.T with the same codes: one scale for the whole tensor, or square blocks."""
    known = spec or spec_t
    assert known is not None
    cast, kernel, refusals = _first(x, known, scale)
    dtype, wants_row, wants_col, on_cpu = x.dtype, spec is not None, spec_t is not None, x.is_cpu
    one_scale = known.granularity.rows is known.granularity.cols is None

    def run(x: Tensor, scale: Tensor | None, staged: Tensor | None) -> Both:
        data, scale_inv, amax = cast(x, scale, staged)
        kept = amax if on_cpu or one_scale else None  # nobody reads amaxes of blocks back from an accelerator
        row = QuantizedTensor(data, scale_inv, known, dtype, kept) if wants_row else None
        # one entry is its own transpose, and a view less is a microsecond less
        turned = scale_inv if one_scale else scale_inv.t()
        col = QuantizedTensor(data.t(), turned, known, dtype, kept) if wants_col else None
        # the native kernel has raised `staged` itself, unless there was nothing to read
        return Both(row, col, None if kernel is native_quantize and staged is not None and x.numel() else amax)

    return CastPlan(run, kernel.NAME, refusals, (spec, spec_t))


def _alone(x: Tensor, spec: QuantizationSpec | None, spec_t: QuantizationSpec | None, scale: Tensor | None) -> CastPlan:
    """A cast of x, or of x.T, by itself."""
    known, turned = spec or spec_t, spec is None
    assert known is not None
    cast, kernel, refusals = _first(x.t() if turned else x, known, scale)
    dtype, on_cpu = x.dtype, x.is_cpu

    def run(x: Tensor, scale: Tensor | None, staged: Tensor | None) -> Both:
        data, scale_inv, amax = cast(x.t() if turned else x, scale, None)
        x_q = QuantizedTensor(data, scale_inv, known, dtype, amax if on_cpu or amax.numel() == 1 else None)
        return Both(None, x_q, amax) if turned else Both(x_q, None, amax)

    return CastPlan(run, kernel.NAME, refusals, (spec, spec_t))


def transformed(
    x: Tensor,
    transform: Transform,
    other: Operand | None,
    ranks: OneRank = ONE_RANK,
    apply: ApplyTransform | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(the matrix to cast in place of x, what the transform took from x).

    Args:
        other: the other operand of the GEMM, if it was cast before.
        ranks: who has the rest of x.
        apply: `transform.apply`, or a kernel with its bits; None: the first that takes x.
    """
    apply = apply or _application(x, transform)[0]
    # both sides of a product need the same signs: who is cast second takes those of the first
    met = other.aside if isinstance(other, QuantizedTensor) and transform.paired else None
    with no_autocast(x.device):
        aside = transform.prepare(x, met, ranks)
        return apply(x, aside), aside


def _application(x: Tensor, transform: Transform) -> tuple[ApplyTransform, str, str | None]:
    """(what applies a transform to matrices like x, its name, why no kernel does)."""
    refusal = native_quantize.supports_transform(x, transform)
    if refusal is None:
        return native_quantize.plan_transform(x, transform), f"{transform} ({native_quantize.NAME})", None
    return transform.apply, str(transform), refusal


def _transformed(x: Tensor, spec: QuantizationSpec | None, spec_t: QuantizationSpec | None) -> CastPlan:
    """Casts with a transform in front of at least one of them; any kernel makes the cast behind it."""
    planned: dict[bool, CastPlan] = {}
    applied: dict[bool, ApplyTransform] = {}
    names, refusals = dict[str, None](), dict[str, None]()
    for lies, side in ((x, spec), (x.t(), spec_t)):
        if side is None or side.transform is None:
            continue
        applied[lies is not x], name, refusal = _application(lies, side.transform)
        names[name] = None
        refusals |= {} if refusal is None else {refusal: None}

    def one(x: Tensor, spec: QuantizationSpec | None, other: Operand | None, turned: bool) -> QuantizedTensor | None:
        if spec is None:
            return None
        y, aside = (x, None) if spec.transform is None else transformed(x, spec.transform, other, apply=applied[turned])
        # the transform decides dtype and shape of what is cast, so this plan can be made only behind it
        if turned not in planned:  # all x of this plan are alike, so all y are
            planned[turned] = _alone(y, spec, None, None)
        y_q = planned[turned].run(y, None, None).row
        assert y_q is not None
        return QuantizedTensor(y_q.data, y_q.scale_inv, spec, x.dtype, y_q.amax, aside)

    def run(x: Tensor, scale: Tensor | None, staged: Tensor | None, beside: Beside = (None, None)) -> Both:
        x = x.detach()
        row, col = one(x, spec, beside[0], False), one(x.t(), spec_t, beside[1], True)
        first = row or col
        assert first is not None
        return Both(row, col, first.amax)

    return CastPlan(run, f"{' and '.join(names)} before a cast", tuple(refusals), (spec, spec_t), True)


def _both_natively(x: Tensor, spec: QuantizationSpec, spec_t: QuantizationSpec) -> Run:
    cast, dtype = native_quantize.plan_quantize_both(x, spec, spec_t), x.dtype

    def run(x: Tensor, scale: Tensor | None, staged: Tensor | None) -> Both:
        (data, scale_inv, amax), (data_t, scale_inv_t, amax_t) = cast(x)
        row = QuantizedTensor(data, scale_inv, spec, dtype, amax)
        return Both(row, QuantizedTensor(data_t, scale_inv_t, spec_t, dtype, amax_t), amax)

    return run


def refuse_unmade(rows: UnmadeRows, *specs: QuantizationSpec | None) -> str | None:
    """Why rows have to be made before they are cast to each of these specs (None: high precision); None if not."""
    if None in specs:
        return "a cell in high precision takes the rows themselves"
    if any(spec.transform for spec in specs if spec):
        return "a transform takes the rows themselves"
    # rows are made from x where x lies, so what holds for x holds for them
    reasons = (triton_quantize.supports_quantize(rows.x, spec) for spec in specs if spec)
    return next(filter(None, reasons), None) or triton_quantize.refuse_fused(rows)


def _on_accelerator(
    x: Tensor | UnmadeRows,
    spec: QuantizationSpec | None,
    spec_t: QuantizationSpec | None,
    scale: Tensor | None,
    staged: Tensor | None,
) -> Callable[[Any, Tensor | None, Tensor | None], Both]:
    """The casts of all x that lie like this one, by Triton."""
    cast = triton_quantize.plan_both(x, spec, spec_t, scale is not None, 0 if staged is None else staged.numel())
    dtype = x.dtype

    def run(x: Tensor | UnmadeRows, scale: Tensor | None, staged: Tensor | None) -> Both:
        row, col = cast(x, scale, staged)
        one = row or col
        assert one is not None
        x_q = None if row is None or spec is None else QuantizedTensor(row.data, row.scale_inv, spec, dtype)
        x_t_q = None if col is None or spec_t is None else QuantizedTensor(col.data, col.scale_inv, spec_t, dtype)
        return Both(x_q, x_t_q, None if staged is not None else one.amax)

    return run


def _first(
    x: Tensor, spec: QuantizationSpec, scale: Tensor | None
) -> tuple[native_quantize.RunCast, QuantizeKernel, tuple[str, ...]]:
    """The first kernel that takes the cast, as a function of (x, scale, staged), and why those before it do not."""
    refusals: list[str] = []
    for kernel in _casts(x):
        if (reason := kernel.supports_quantize(x, spec, scale)) is None:
            break
        refusals.append(reason)
    plan = getattr(kernel, "plan_quantize", None)
    if plan is not None:
        return plan(x, spec), kernel, tuple(refusals)  # decided now: its function asks nothing any more

    quantize: Callable[..., reference.Cast] = kernel.quantize  # type: ignore[attr-defined]  # it has one of the two

    def cast(x: Tensor, scale: Tensor | None, staged: Tensor | None) -> reference.Cast:
        with no_autocast(x.device):
            return quantize(x.detach(), spec, scale)

    return cast, kernel, tuple(refusals)


def dequantize(x_q: QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """As `QuantizedTensor.dequantize`, bit for bit, by the fastest kernel that takes it.

    Args:
        dtype: of the result; None: that of the original.
    """
    wanted = dtype or x_q.dtype
    if (
        not torch.compiler.is_compiling()
        and wanted in (torch.float32, torch.bfloat16)
        and native_quantize.supports_decode(x_q.data, x_q.spec.format) is None
    ):
        if x_q.scale_inv.dtype == torch.uint8:
            # exponents in bytes: kernels multiply by fp32 numbers
            x_q = QuantizedTensor(x_q.data, read_scales(x_q.scale_inv), x_q.spec, x_q.dtype)
        return native_quantize.plan_dequantize(x_q, wanted)(x_q)
    return x_q.dequantize(wanted)


def explain_quantize(x: Tensor, spec: QuantizationSpec, *, scale: Tensor | None = None) -> str:
    """The kernel that `quantize` would run on this matrix, and why not the kernels before it, one per line."""
    plan = plan_casts(x, spec, scale=scale)
    return "\n".join([*plan.refusals, f"{plan.kernel}: runs"])


def _casts(x: Tensor) -> tuple[QuantizeKernel, ...]:
    return _CPU_CASTS if x.is_cpu else _ACCELERATOR_CASTS


def _codes_like(x: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Empty codes: contiguous on an accelerator, as its GEMMs need them; with the strides of x on a CPU."""
    if x.device.type == "cpu":
        return torch.empty_like(x, dtype=dtype, device=device)
    return torch.empty(x.shape, dtype=dtype, device=device)


def _as_promised(data: Tensor, x: Tensor) -> Tensor:
    """Codes of x with the strides that compiled code expects; nearly always they have them."""
    if data.stride() == x.stride() and x.device.type == "cpu":
        return data
    # the fake kernel has promised strides to Inductor, which reads memory by them without a look at the tensor
    strides = _codes_like(x, data.dtype, "meta").stride()
    if data.stride() == strides:
        return data
    return torch.empty_strided(data.shape, strides, dtype=data.dtype, device=data.device).copy_(data)


def _promised(x: Tensor, spec: str, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    parsed = spec_from_key(spec)
    grid = parsed.granularity.grid_shape((x.shape[0], x.shape[1]))
    data = _codes_like(x, parsed.format.storage_dtype, x.device)
    return data, x.new_empty(grid, dtype=torch.float32), x.new_empty(grid, dtype=torch.float32)


@custom_operator("quantize(Tensor x, str spec, Tensor? scale) -> (Tensor, Tensor, Tensor)", _promised)
def _quantize_op(x: Tensor, spec: str, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    x_q, _, amax = plan_casts(x, spec_from_key(spec), scale=scale).run(x, scale, None)
    assert x_q is not None
    assert amax is not None  # nothing is staged
    return _as_promised(x_q.data, x), x_q.scale_inv, amax


def _both_promised(x: Tensor, spec: str, spec_t: str, scale: Tensor | None) -> tuple[Tensor, ...]:
    data, scale_inv, amax = _promised(x, spec, scale)
    data_t, scale_inv_t, _ = _promised(x.t(), spec_t, scale)
    if x.is_cuda and triton_quantize.turned(spec_from_key(spec), spec_from_key(spec_t)):
        scale_inv, amax, scale_inv_t = (one.new_empty(one.shape[::-1]).t() for one in (scale_inv, amax, scale_inv_t))
    shared = triton_quantize.shared(spec_from_key(spec), spec_from_key(spec_t))
    return data, scale_inv, amax, data_t, x.new_empty(0, dtype=torch.float32) if shared else scale_inv_t


@custom_operator(
    "quantize_both(Tensor x, str spec, str spec_t, Tensor? scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _both_promised,
)
def _quantize_both_op(x: Tensor, spec: str, spec_t: str, scale: Tensor | None) -> tuple[Tensor, ...]:
    """(codes, scale_inv, amax) of x, (codes, scale_inv) of x.T; the last is empty if they share their scales."""
    row_spec, col_spec = spec_from_key(spec), spec_from_key(spec_t)
    row, col, amax = plan_casts(x, row_spec, col_spec, scale=scale).run(x, scale, None)
    assert row is not None
    assert col is not None
    assert amax is not None  # both specs are given, and no door stages the amax
    codes_t = _as_promised(col.data, x.t())
    if codes_t.data_ptr() == row.data.data_ptr():  # outputs of an operator must not share memory
        codes_t = codes_t.clone(memory_format=torch.preserve_format)
    own = x.new_empty(0, dtype=torch.float32) if triton_quantize.shared(row_spec, col_spec) else col.scale_inv
    scales = (row.scale_inv, amax, own)
    if x.is_cuda and triton_quantize.turned(row_spec, col_spec):  # nearly always they lie so: no copy
        scales = (scales[0].t().contiguous().t(), amax.t().contiguous().t(), own.t().contiguous().t())
    return _as_promised(row.data, x), scales[0], scales[1], codes_t, scales[2]


def _behind_promised(x: Tensor, spec: str, met: Tensor | None) -> tuple[Tensor, ...]:
    parsed = spec_from_key(spec)
    assert parsed.transform is not None
    rows, cols = x.shape
    cols += -cols % (parsed.transform.group or 1)  # a rotation pads columns with zeros to whole groups
    grid = parsed.granularity.grid_shape((rows, cols))
    aside = parsed.transform.prepare(x, met)
    data = x.new_empty(rows, cols, dtype=parsed.format.storage_dtype)
    return data, x.new_empty(grid, dtype=torch.float32), x.new_empty(0) if aside is None else torch.empty_like(aside)


_BEHIND = "(Tensor x, str spec, Tensor? met) -> (Tensor, Tensor, Tensor)"


@custom_operator(f"quantize_drawn{_BEHIND}", _behind_promised, torch.Tag.nondeterministic_seeded)
@custom_operator(f"quantize_behind{_BEHIND}", _behind_promised)
def _quantize_behind_op(x: Tensor, spec: str, met: Tensor | None) -> tuple[Tensor, ...]:
    """(codes, scale_inv, aside) of what the spec's transform makes of x; met: `aside` of the other operand."""
    parsed = spec_from_key(spec)
    other = None if met is None else QuantizedTensor(x, x, parsed, x.dtype, aside=met)
    x_q = quantize(x, parsed, beside=other)
    aside = x.new_empty(0) if x_q.aside is None else x_q.aside.clone() if x_q.aside is met else x_q.aside
    return x_q.data.contiguous(), x_q.scale_inv, aside


# --- x.T from the codes of x, where scales are powers of two: blocks turn without a second rounding ---

_POWERS = ("pow2", "e8m0", "e8m0_floor")
"""Scale formats in which every scale is a power of two."""


def refuse_turn(spec: QuantizationSpec, spec_t: QuantizationSpec) -> str | None:
    """Why `turn` cannot make x.T from the codes of x; None if it can.

    Example:
        >>> from ottava.recipe import RECIPES
        >>> refuse_turn(*RECIPES["blockwise"].cells("input")), refuse_turn(*RECIPES["blockwise_fp32"].cells("input"))
        (None, 'fp32 scales are no powers of two, so that codes would be rounded twice')
    """
    if spec.format != spec_t.format:
        return f"x is cast to {spec.format} and x.T to {spec_t.format}"
    for side in (spec, spec_t):
        if side.scale_format not in _POWERS:
            return f"{side.scale_format} scales are no powers of two, so that codes would be rounded twice"
        if not side.repeatable or side.predicted:
            return f"only x itself can be cast to {side}"
    return None


def turn(x_q: QuantizedTensor, spec_t: QuantizationSpec) -> QuantizedTensor:
    """x.T cast to spec_t, from the codes of x: between scales that are powers of two a code moves by whole octaves.

    A number loses bits only if it becomes a subnormal of its new block. Then it is rounded once more, by at most half
    the smallest subnormal. ("e8m0_floor" saturates numbers near the top, as in any cast.) The caller may free x.

    Raises:
        ValueError: `refuse_turn` gives the reason.
    Source: FP8-Flow-MoE (arXiv 2511.02302). Its 128x128 tiles take the largest scale of their rows; here each block of
        x.T has the scale of its own amax.

    Example:
        >>> from ottava.recipe import RECIPES
        >>> row, col = RECIPES["mxfp8"].cells("input")
        >>> x = torch.tensor([[1.0, 300.0], [2.0, 500.0]])
        >>> from ottava.ops.quantize import quantize
        >>> turn(quantize(x, row), col).dequantize()                                 # 500 is no number of E4M3
        tensor([[  1.,   2.],
                [288., 512.]])
    """
    if reason := refuse_turn(x_q.spec, spec_t):
        raise ValueError(f"turn: {reason}: quantize x.T itself")
    numbers = dequantize(x_q, torch.float32)  # exact: a code times a power of two
    # a cast from numbers: each block of x.T gets the scale of its own amax
    turned = cast_both(numbers, None, spec_t).col
    assert turned is not None
    return QuantizedTensor(turned.data, turned.scale_inv, spec_t, x_q.dtype)
