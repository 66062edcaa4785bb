"""The four-GEMM probe: splits a GEMM's error into left operand, right operand and accumulation.

It computes y = x w.T, and likewise dx and dw, from the real operands of a layer:

    (x_q, w)     only the left operand quantized, multiplied in high precision
    (x, w_q)     only the right operand quantized
    (x_q, w_q)   both quantized, multiplied in high precision: the error of quantization
    native       both quantized, multiplied by the engine: any further error comes from accumulation or kernel

On a CPU, and wherever the reference kernel runs, products are summed in fp32. The last two then agree, which says
nothing about the accumulator of a tensor core. Under a recipe that names one ("tensorwise/hopper") they are summed as
there, on any machine, and once more with promotions to fp32, the usual remedy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ottava.base.text import finite
from ottava.experiments.replay import door_hooks
from ottava.measure.statistics import STATISTICS
from ottava.measure.walk import measure
from ottava.numerics.accumulator import Accumulator
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.ops.gemm import GemmRecord, gemm, whole
from ottava.ops.quantize import quantize
from ottava.recipe import GEMMS, TENSOR_OF, GemmRecipe, Recipe
from ottava.record.dumps import GemmDump

PROMOTION = 128
"""Products between promotions to fp32, as cuBLASLt's slow accumulation and DeepGEMM have them."""
_EVIDENCE = ("underflow_pct", "overflow_pct", "row_sqnr_p50_db", "sqnr_db", "mean_relative_error", "amax")


@dataclass(frozen=True, eq=False)
class Operands:
    """The operands of one layer in one step, before any cast."""

    x: Tensor
    """(M, K)"""
    w: Tensor
    """(N, K)"""
    dy: Tensor | None
    """(M, N); None without a backward."""
    scales: Mapping[str, Tensor]
    """Tensor -> predicted scale, if it has one."""

    def side(self, gemm: str, side: str) -> tuple[str, Tensor]:
        """The long name of a cell's tensor, and the tensor as the GEMM contracts it: over its last dimension."""
        tensor, direction = TENSOR_OF[gemm, side]
        x = {"input": self.x, "weight": self.w, "grad_output": self.dy}[tensor]
        assert x is not None  # without a backward, callers ask for fprop only
        return tensor, x if direction == "row" else x.t()


@dataclass(frozen=True)
class GemmProbe:
    """SQNRs of one GEMM's result, compared with the same product in fp32."""

    gemm: str
    """fprop, dgrad or wgrad."""
    lhs: str
    """Spec of the left operand."""
    rhs: str
    only_lhs_db: float
    """Only the left operand quantized."""
    only_rhs_db: float
    both_db: float
    """Both quantized, multiplied in high precision."""
    native_db: float
    """Both quantized, multiplied by the engine."""
    row_p50_db: float
    """As native_db, for the median row of the result."""
    emulated: bool
    """Whether the engine emulates this GEMM, with fp32 sums."""
    accumulator: str = ""
    """The profile that native_db was summed under; "": the device's own sums."""
    promoted_db: float = math.nan
    """As native_db, with a promotion to fp32 every 128 products; NaN without a profile that lacks one."""

    @property
    def worse_operand(self) -> str:
        """ "lhs" or "rhs"."""
        return "lhs" if self.only_lhs_db <= self.only_rhs_db else "rhs"

    @property
    def accumulation_share(self) -> float:
        """Share of the error power that the operands do not explain; 0 to 1."""
        if math.isinf(self.native_db):
            return 0.0
        return max(0.0, 1.0 - 10 ** ((self.native_db - self.both_db) / 10))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; None for an SQNR without error."""
        values = {**asdict(self), "worse_operand": self.worse_operand, "accumulation_share": self.accumulation_share}
        return dict(finite(values))


def probe_gemms(operands: Operands | GemmDump, recipe: Recipe) -> list[GemmProbe]:
    """Probes the quantized GEMMs of a layer.

    Args:
        operands: the layer's operands, from `captured` or from a dump.
        recipe: the layer's recipe, overrides applied.
    Returns:
        One probe for each quantized GEMM; without dy only fprop's.

    Example:
        >>> import ottava
        >>> x, w, dy = torch.randn(64, 128), torch.randn(32, 128), torch.randn(64, 32)
        >>> x[:, 0] *= 1e6                                              # an outlier channel
        >>> probes = probe_gemms(Operands(x, w, dy, {}), ottava.RECIPES["rowwise"])
        >>> [probe.gemm for probe in probes], probes[2].both_db > 25
        (['fprop', 'dgrad', 'wgrad'], True)
    """
    if isinstance(operands, GemmDump):
        operands = Operands(operands.x, operands.w, operands.dy, {})
    probes = []
    for name in GEMMS:
        cells: GemmRecipe = getattr(recipe, name)
        if cells.lhs is None or cells.rhs is None or (operands.dy is None and name != "fprop"):
            continue
        probes.append(_probe(name, cells, cells.lhs, cells.rhs, operands))
    return probes


def cast_evidence(operands: Operands, gemm_name: str, side: str, spec: QuantizationSpec) -> dict[str, float]:
    """Statistics of the cast of one operand."""
    tensor, x = operands.side(gemm_name, side)
    x_q = quantize(x, spec, scale=_scale(operands, tensor, spec))
    tally = measure(x_q.transformed(x), x_q)
    return {name: float(STATISTICS[name].finish(tally)) for name in _EVIDENCE}


@contextmanager
def captured(layer: Any) -> Iterator[dict[str, Any]]:
    """Keeps the first tensor at each door of an ottava layer; `operands_of` makes operands of them."""
    seen: dict[str, Any] = {"scales": {}}

    def keep(tensor: str, x: Tensor, _: Any) -> None:
        if tensor not in seen:
            door = getattr(layer.quantizers, tensor)
            seen[tensor] = x.detach().clone()
            if door.spec is not None and bool(door.scale > 0):
                seen["scales"][tensor] = door.scale.clone()

    with door_hooks(layer, keep):
        yield seen


def operands_of(seen: Mapping[str, Any]) -> Operands | None:
    """The operands that `captured` kept; None if the layer made no cast."""
    if "input" not in seen or "weight" not in seen:
        return None
    return Operands(seen["input"], seen["weight"], seen.get("grad_output"), seen["scales"])


@torch.no_grad()
def _probe(name: str, cells: GemmRecipe, lhs: QuantizationSpec, rhs: QuantizationSpec, operands: Operands) -> GemmProbe:
    (left, a), (right, b) = operands.side(name, "lhs"), operands.side(name, "rhs")
    a_q = quantize(a, lhs, scale=_scale(operands, left, lhs))
    b_q = quantize(b, rhs, scale=_scale(operands, right, rhs), beside=a_q)
    exact_a, exact_b = (whole(x_q, x_q.transformed(x)) for x, x_q in ((a, a_q), (b, b_q)))
    near_a, near_b = whole(a_q), whole(b_q)
    reference = exact_a @ exact_b.t()
    records: list[GemmRecord] = []
    settings: dict[str, Any] = {"fast_accum": cells.fast_accum, "compute": cells.compute, "log": records.append}
    y = gemm(a_q, b_q, out_dtype=torch.float32, accumulator=cells.accumulator, **settings)
    return GemmProbe(
        gemm=name,
        lhs=str(lhs),
        rhs=str(rhs),
        only_lhs_db=_sqnr(near_a @ exact_b.t(), reference),
        only_rhs_db=_sqnr(exact_a @ near_b.t(), reference),
        both_db=_sqnr(near_a @ near_b.t(), reference),
        native_db=_sqnr(y, reference),
        row_p50_db=_row_sqnr(y, reference),
        emulated=not records[0].native and not records[0].accumulator,
        accumulator=records[0].accumulator,
        promoted_db=_promoted(a_q, b_q, cells.accumulator, reference),
    )


def _promoted(a: QuantizedTensor, b: QuantizedTensor, profile: Accumulator | None, reference: Tensor) -> float:
    if profile is None or profile.group is None or profile.promotion is not None:
        return math.nan
    slow = replace(profile, name=f"{profile.name} promoted", promotion=-(-PROMOTION // profile.group) * profile.group)
    return _sqnr(gemm(a, b, out_dtype=torch.float32, accumulator=slow), reference)


def _scale(operands: Operands, tensor: str, spec: QuantizationSpec) -> Tensor | None:
    return operands.scales.get(tensor) if spec.predicted else None


def _sqnr(y: Tensor, reference: Tensor) -> float:
    noise, signal = float((y - reference).double().square().sum()), float(reference.double().square().sum())
    return math.inf if noise == 0 else -10 * math.log10(noise / signal) if signal > 0 else math.nan


def _row_sqnr(y: Tensor, reference: Tensor) -> float:
    noise, signal = (y - reference).double().square().sum(1), reference.double().square().sum(1)
    ratio = (noise / signal)[signal > 0]
    middle = float(ratio.median()) if ratio.numel() else math.nan
    return math.inf if middle == 0 else -10 * math.log10(middle)
