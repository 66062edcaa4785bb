"""The casts of FP8 attention, as data: the part of a recipe besides the GEMMs of linear layers.

Six tensors, the same as in cuDNN and TransformerEngine: three of the forward, three of the backward.
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
"""The tensors that FP8 attention casts, forward and backward; see `AttentionRecipe`."""
_FORWARD, _BACKWARD = QuantizationSpec(E4M3), QuantizationSpec(E5M2)


@dataclass(frozen=True)
class AttentionRecipe(RefusesUnknownFields):
    """The spec of each tensor that FP8 attention casts: one scale for each tensor, and one for q, k and v together.

    Raises:
        TypeError: a field needs a spec and has none.
        ValueError: a spec is not per tensor, or predicts its scale; or no tensor core multiplies a pair.

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
            if spec.transform is not None:
                raise ValueError(f"AttentionRecipe: {tensor} is {spec}; transforms are for the GEMMs of linear layers")
            if spec.granularity != PER_TENSOR or spec.predicted:
                raise ValueError(
                    f"AttentionRecipe: {tensor} is {spec}; needs one current scale for the tensor: each GEMM would "
                    "need blocks along another dimension, and only linear layers keep histories"
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
        """The inverse of `to_dict`; a missing field takes its default."""
        need_type("AttentionRecipe", values, Mapping)
        specs: dict[str, Any] = {name: QuantizationSpec.from_dict(v) if v else None for name, v in values.items()}
        return cls(**specs)
