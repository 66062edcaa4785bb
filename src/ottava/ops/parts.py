"""What transforms have set aside of two operands, added to their product in high precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ottava.numerics.tensor import Operand, QuantizedTensor
from ottava.numerics.transforms import LowRank
from ottava.ops.dispatch import no_autocast
from ottava.ops.quantize import dequantize


def rests(a: Operand, b: Operand) -> tuple[Operand, Operand] | None:
    """The operands without the parts that were set aside; None if nothing was.

    Example:
        >>> import ottava
        >>> x = torch.ones(2, 2)
        >>> rests(ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3)), x) is None
        True
    """
    if _part(a) is None and _part(b) is None:
        return None
    one, other = (replace(t, aside=None) if isinstance(t, QuantizedTensor) else t for t in (a, b))
    return one, other


def with_parts(run: Callable[..., Tensor], out_dtype: torch.dtype) -> Callable[..., Tensor]:
    """A GEMM of rests, (a, b, bias) -> fp32 (M, N), as one of whole operands: parts and bias are added in fp32, before
    the one rounding to out_dtype."""

    def whole_product(a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None, c: Tensor | None = None) -> Tensor:
        with no_autocast(a.device):
            y = run(a, b, None) if c is None else run(a, b, None, c)
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
        y = y + one.left @ (one.right.t() @ other.right) @ other.left.t()
        if _centred(a) and _centred(b):
            return y
    if one is not None:
        y = y + one.left @ (one.right.t() @ dequantize(b, torch.float32).t())
    if other is not None:
        y = y + (dequantize(a, torch.float32) @ other.right) @ other.left.t()
    return y


def _centred(operand: QuantizedTensor) -> bool:
    return operand.spec.transform is not None and operand.spec.transform.centred


def _part(operand: Any) -> LowRank | None:
    if not isinstance(operand, QuantizedTensor) or operand.spec.transform is None or operand.aside is None:
        return None
    return operand.spec.transform.low_rank(operand.aside, (operand.shape[0], operand.shape[1]))
