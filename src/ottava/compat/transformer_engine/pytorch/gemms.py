"""TransformerEngine's GEMMs of quantized tensors, for scripts that multiply themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ottava.compat.transformer_engine.pytorch.tensors import QuantizedTensor, _plain
from ottava.numerics.tensor import QuantizedTensor as Codes
from ottava.ops.gemm import gemm


def general_gemm(
    A: Tensor,
    B: Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    layout: str = "TN",
    bias: Tensor | None = None,
    grad: bool = False,
    accumulate: bool = False,
    out: Tensor | None = None,
    alpha: float = 1.0,
    use_split_accumulator: bool = False,
    quantization_params: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None, None, None]:
    """TransformerEngine's GEMM: B A.T ("TN"), B A ("NN") or B.T A ("NT"), of two quantized or two plain tensors.

    Args:
        A, B: tensors; leading dimensions are folded. Quantized ones need the codes of the dimension that is summed.
        bias: added to the result; with grad, its gradient is returned in the second place.
        accumulate, out: add to out, which is returned.
        quantization_params: cast the result.
    Raises:
        NotImplementedError: gelu, user buffers or another argument.  ValueError: unknown layout, or codes are missing.

    Example:
        >>> general_gemm(torch.ones(2, 16), torch.ones(3, 16))[0].shape
        torch.Size([3, 2])
    """
    if layout not in ("TN", "NN", "NT"):
        raise ValueError(f"general_gemm: got layout {layout!r}; needs 'TN', 'NN' or 'NT'")
    for name, value in others.items():
        if value not in (None, False):
            raise NotImplementedError(f"general_gemm: {name}={value!r} is not in ottava: leave it out")
    a, b = _operand(A, "A", columns=layout[0] == "N"), _operand(B, "B", columns=layout[1] == "T")
    dtype = out_dtype or (out.dtype if out is not None else A.dtype)
    wide = accumulate or alpha != 1.0
    y = gemm(
        b,
        a,
        out_dtype=torch.float32 if wide else dtype,
        bias=None if grad else bias,
        fast_accum=isinstance(a, Codes) and not use_split_accumulator,
    )
    y = (alpha * y) if alpha != 1.0 else y
    folded = B.shape[:-1] if layout != "NT" else B.shape[-1:]
    y = y.reshape(*folded, y.shape[-1])
    if accumulate and out is not None:
        y = out.float() + y
    y = y.to(dtype)
    y = y if out is None else out.copy_(y)
    d_bias = _plain(B).reshape(-1, B.shape[-1]).sum(0).to(dtype) if grad and bias is not None else None
    return (y if quantization_params is None else quantization_params(y)), d_bias, None, None


def general_grouped_gemm(
    A: Sequence[Tensor],
    B: Sequence[Tensor],
    out: Sequence[Tensor],
    quantization_params: Sequence[Any],
    out_dtype: torch.dtype | None = None,
    layout: str = "TN",
    m_splits: Sequence[int] | None = None,
    **others: Any,
) -> tuple[Any, list[Any], list[Any]]:
    """`general_gemm` of each pair, written into out.

    Args:
        out: a tensor for each pair; with single_output one, whose rows m_splits divides.
        others: bias (a list, counts with use_bias), and arguments of `general_gemm`.
    Returns:
        out, or its one tensor; the gradients of the biases; a third list, for GELU's inputs.

    Example:
        >>> x, w, y = torch.ones(3, 16), torch.ones(2, 4, 16), torch.empty(3, 4)
        >>> general_grouped_gemm(list(w), x.split([2, 1]), [y], [None] * 2, m_splits=[2, 1], single_output=True)[0][0]
        tensor([16., 16., 16., 16.])
    """
    biases = others.pop("bias", None) if others.pop("use_bias", False) else [None] * len(A)
    one_tensor = others.pop("single_output", False)
    places = out[0].split(list(m_splits or ())) if one_tensor else out
    made = [
        general_gemm(a, b, layout=layout, bias=bias, out=place, quantization_params=cast, **others)
        for a, b, bias, place, cast in zip(A, B, biases, places, quantization_params, strict=True)
    ]
    return out[0] if one_tensor else out, [one[1] for one in made], [None] * len(A)


def _operand(x: Tensor, name: str, *, columns: bool) -> Any:
    if not isinstance(x, QuantizedTensor):
        matrix = x.reshape(-1, x.shape[-1])
        return matrix.t().contiguous() if columns else matrix
    codes, other = (x.columns, x.rows) if columns else (x.rows, x.columns)
    if codes is None and isinstance(other, Codes) and other.spec.granularity.transposes and not other.spec.transform:
        return other.t()
    if codes is None:
        word = "columnwise" if columns else "rowwise"
        raise ValueError(f"general_gemm: {name} has no {word} codes; needs quantizer.set_usage({word}=True)")
    return codes
