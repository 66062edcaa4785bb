"""What attention casts where it runs on FP8 operands: the part of a recipe that is no GEMM of a linear layer. All data.

Six tensors, as cuDNN and TransformerEngine have them: three of the forward, three of the backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ottava.errors import RefusesUnknownFields, need_type
from ottava.formats import E4M3, E5M2
from ottava.quantized_tensor import QuantizationSpec, refuse_pair
from ottava.scaling import PER_TENSOR

ATTENTION_TENSORS = ("qkv", "s", "o", "do", "dp", "dqkv")
"""What FP8 attention casts, forward and backward, see `AttentionRecipe`."""
_FORWARD, _BACKWARD = QuantizationSpec(E4M3), QuantizationSpec(E5M2)


@dataclass(frozen=True)
class AttentionRecipe(RefusesUnknownFields):
    """What attention casts, where it runs on FP8 operands: one scale a tensor, and one for all of q, k and v.

    Raises:
        TypeError: no spec where one is needed.
        ValueError: a spec that is not per tensor or predicts its scale, or a pair that no tensor core multiplies.

    Example:
        >>> str(AttentionRecipe())
        'qkv E4M3[tensor], s E4M3[tensor], o E4M3[tensor], do E5M2[tensor], dp E5M2[tensor], dqkv E5M2[tensor]'
    """

    qkv: QuantizationSpec = _FORWARD
    """Queries, keys and values."""
    s: QuantizationSpec = _FORWARD
    """Softmax's probabilities."""
    o: QuantizationSpec | None = _FORWARD
    """The result; None leaves it in high precision."""
    do: QuantizationSpec = _BACKWARD
    """Its gradient."""
    dp: QuantizationSpec = _BACKWARD
    """The gradient of the scores."""
    dqkv: QuantizationSpec | None = _BACKWARD
    """Gradients of queries, keys and values; None leaves them in high precision."""

    def __post_init__(self) -> None:
        for tensor in ATTENTION_TENSORS:
            spec = getattr(self, tensor)
            if spec is None and tensor in ("o", "dqkv"):  # no GEMM of attention's own reads them
                continue
            need_type(f"AttentionRecipe: {tensor}", spec, QuantizationSpec)
            if spec.granularity != PER_TENSOR or spec.predicted:
                raise ValueError(
                    f"AttentionRecipe: {tensor} is {spec}; needs one current scale a tensor: blocks would lie along "
                    "another dimension in each GEMM, and histories are kept for linear layers alone"
                )
        for lhs, rhs in (("qkv", "qkv"), ("s", "qkv"), ("do", "qkv"), ("s", "do"), ("dp", "qkv")):
            if reason := refuse_pair(getattr(self, lhs), getattr(self, rhs)):
                raise ValueError(f"AttentionRecipe: {lhs} meets {rhs}: {reason}")

    def __str__(self) -> str:
        return ", ".join(f"{tensor} {getattr(self, tensor) or 'high precision'}" for tensor in ATTENTION_TENSORS)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; None is high precision."""
        specs = {tensor: getattr(self, tensor) for tensor in ATTENTION_TENSORS}
        return {tensor: None if spec is None else spec.to_dict() for tensor, spec in specs.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AttentionRecipe:
        """The inverse of `to_dict`; what is not given is the default."""
        need_type("AttentionRecipe", values, Mapping)
        specs: dict[str, Any] = {name: QuantizationSpec.from_dict(v) if v else None for name, v in values.items()}
        return cls(**specs)
