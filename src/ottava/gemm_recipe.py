"""The two cells of one GEMM and the way to compute it: a row of a recipe's table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ottava.accumulator import Accumulator, get_accumulator
from ottava.errors import RefusesUnknownFields, need_type, unknown_name
from ottava.quantized_tensor import QuantizationSpec, refuse_pair

Compute = Literal["native", "bf16"]


@dataclass(frozen=True)
class GemmRecipe(RefusesUnknownFields):
    """The two cells of one GEMM, and the way to compute it.

    Raises:
        ValueError: no hardware multiplies these two operands (see `quantized_tensor.refuse_pair`).
    """

    lhs: QuantizationSpec | None = None
    """Left operand; None stays in high precision."""
    rhs: QuantizationSpec | None = None
    """Right operand."""
    fast_accum: bool = False
    """Let Hopper keep partial sums in its short accumulator. The field does so in fprop only."""
    compute: Compute = "native"
    """"bf16": decode the operands and multiply in BF16, to tell damage by quantization from damage by accumulation."""
    accumulator: Accumulator | None = None
    """The profile that quantized operands are summed under, on any device, or its name; None: the device's own sums."""
    batch_invariant: bool = False
    """Multiply by the one kernel whose bits of a row do not depend on the other rows; see `batch_invariance`."""

    def __post_init__(self) -> None:
        if self.compute not in get_args(Compute):
            raise ValueError(f"GemmRecipe: {unknown_name('compute', self.compute, get_args(Compute))}")
        for name in ("fast_accum", "batch_invariant"):
            need_type(f"GemmRecipe: {name}", getattr(self, name), bool)
        if self.accumulator is not None:
            object.__setattr__(self, "accumulator", get_accumulator(self.accumulator))
            if self.compute != "native":
                name = self.accumulator.name
                raise ValueError(f"GemmRecipe: accumulator {name!r} with compute 'bf16', which multiplies no codes")
        if reason := refuse_pair(self.lhs, self.rhs, self.accumulator):
            raise ValueError(f"GemmRecipe(lhs={self.lhs}, rhs={self.rhs}): {reason}")

    @property
    def quantized(self) -> bool:
        """Whether this GEMM's operands are quantized."""
        return self.lhs is not None

    def __str__(self) -> str:
        suffix = " in BF16" if self.compute == "bf16" and self.quantized else ""
        suffix += f" under {self.accumulator.name}" if self.accumulator and self.quantized else ""
        return f"{self.lhs or 'high precision'} x {self.rhs or 'high precision'}{suffix}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values; an empty mapping is high precision."""
        values: dict[str, Any] = {}
        if self.lhs is not None and self.rhs is not None:
            values |= {"lhs": self.lhs.to_dict(), "rhs": self.rhs.to_dict()}
        if self.fast_accum:
            values["fast_accum"] = True
        if self.compute != "native":
            values["compute"] = self.compute
        if self.accumulator is not None:
            values["accumulator"] = self.accumulator.to_dict()
        if self.batch_invariant:
            values["batch_invariant"] = True
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GemmRecipe:
        """The inverse of `to_dict`."""
        need_type("GemmRecipe", values, Mapping)
        cells = {side: QuantizationSpec.from_dict(values[side]) for side in ("lhs", "rhs") if values.get(side)}
        return cls(**{**values, "lhs": cells.get("lhs"), "rhs": cells.get("rhs")})


HIGH_PRECISION = GemmRecipe()
