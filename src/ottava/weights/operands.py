"""The operands that a weight gives which is stored only as codes, and why some recipes cannot have such weights."""

from __future__ import annotations

import functools

from torch import Tensor

from ottava.kernels.gate import constant_in_graph
from ottava.numerics.scaling import read_scales
from ottava.numerics.tensor import Operand, QuantizationSpec, QuantizedTensor, spec_from_key
from ottava.ops.quantize import refuse_turn, turn
from ottava.weights.parameter import QuantizedWeight, describe, stored_spec


def refuse_weight(stored: QuantizationSpec | None, row: QuantizationSpec | None, col: QuantizationSpec | None) -> str:
    """Why codes of a weight cannot be the operands of its two GEMMs; "" if they can.

    Args:
        stored: how it is stored; None: as row says.
        row, col: the cells of W and of W.T; None, high precision, takes any.

    Example:
        >>> from ottava.recipe import RECIPES
        >>> refuse_weight(None, *RECIPES["blockwise"].cells("weight"))
        ''
    """
    own = stored or (None if row is None else stored_spec(row))
    if own is None:
        return "the recipe leaves the weight in high precision"
    for cell in (row, col):
        if cell is not None and cell.transform is not None:
            return f"{cell} casts what its transform makes of the weight's numbers, and codes have been rounded already"
    if row is not None and stored_spec(row) != own:
        return f"it is stored as {own} and the recipe casts it to {row}, a second rounding"
    if col is None or (stored_spec(col) == own and own.granularity.transposes):
        return ""
    reason = refuse_turn(own, stored_spec(col))
    return f"W.T has scales of its own ({col}), and {reason}" if reason else ""


def weight_operands(
    weight: QuantizedWeight,
    row: QuantizationSpec | None,
    col: QuantizationSpec | None,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
) -> tuple[QuantizedTensor | None, Operand | None]:
    """The operands of W (N, K) and W.T (K, N) from the stored codes; nothing is cast again.

    A cell of None, high precision, gets the codes too: `ops.gemm.multiply` decodes them when it reads them, so that no
    copy in high precision lives from forward to backward. Where W.T has scales of its own, codes move by whole octaves
    (`casts.turn`), or FSDP2 has gathered them. Of a weight that FSDP2 has lent, a forward gets the weight itself in
    place of W.T: its backward asks for W.T alone.

    Raises:
        ValueError: the cells do not take these codes; what to choose.
        RuntimeError: FSDP2 has not gathered an operand that is wanted.
    """
    if (lent := weight.lent) is not None:
        if lent.w_t is not None and columnwise and (col is None or stored_spec(col) != lent.w_t):
            raise ValueError(
                f"{describe(weight)}: FSDP2 gathers its transpose as {lent.w_t} and the recipe asks for "
                f"{col or 'high precision'}. Choose a recipe with that cell, or shard with torch's own fully_shard"
            )
        if (rowwise and not lent.holds_w) or (columnwise and not rowwise and lent.w_t and lent.of_w_t is None):
            raise RuntimeError(
                f"{describe(weight)}: FSDP2 has gathered codes for the {'backward' if rowwise else 'forward'} alone, "
                f"and this {'forward' if rowwise else 'backward'} runs on them. If you change "
                "set_reshard_after_forward, set_reshard_after_backward or set_unshard_in_backward, do it while the "
                "module is sharded: call module.reshard() first"
            )
        if columnwise and not rowwise and lent.of_w_t is not None:
            return None, lent.of_w_t()
    # not `weight.scale_inv`: Dynamo would guard on a tensor that is new, or another one, at each look
    codes, scale_inv, own = weight.codes, read_scales(weight.scales), weight.spec
    two_scales = lent is not None and lent.w_t is not None
    col_key = None if col is None or not columnwise or two_scales else col.key
    reason, turned = _decided(own.key, None if row is None else row.key, col_key)
    if reason:
        raise ValueError(
            f"{describe(weight)}: {reason}. Choose a recipe whose weight cell is {own}, or give the weights back their "
            "dtype: ottava.convert(model, recipe, weights='bf16')"
        )
    of_w = None  # where it is decoded, the scales are read then, too
    if rowwise:
        of_w = QuantizedTensor(codes, weight.scales if row is None else scale_inv, row or own, weight.dtype)
    if not columnwise:
        return of_w, None
    if rowwise and lent is not None:
        return of_w, weight
    if col is None:
        return of_w, QuantizedTensor(codes.t(), weight.scales.t(), own.transposed, weight.dtype)
    if turned:
        return of_w, turn(QuantizedTensor(codes, scale_inv, own, weight.dtype), col)
    data = codes.t() if codes.is_cpu else codes.t().contiguous()  # as an accelerator's GEMMs want it
    return of_w, QuantizedTensor(data, scale_inv.t(), col, weight.dtype)


@constant_in_graph
def _decided(stored: str, row: str | None, col: str | None) -> tuple[str, bool]:
    """(why not, whether W.T is made by `turn`) of specs, by their keys: compiled code makes no specs."""
    return _decided_once(stored, row, col)


@functools.lru_cache(maxsize=256)
def _decided_once(stored: str, row: str | None, col: str | None) -> tuple[str, bool]:
    own, of_w, of_w_t = (None if key is None else spec_from_key(key) for key in (stored, row, col))
    assert own is not None
    shares = of_w_t is not None and own.granularity.transposes and stored_spec(of_w_t) == own
    return refuse_weight(own, of_w, of_w_t), of_w_t is not None and not shares


def shared_bytes(operand: Operand | None, weight: Tensor) -> int:
    """Bytes of an operand that share the weight's memory, so that keeping the operand costs nothing."""
    if not isinstance(weight, QuantizedWeight) or not isinstance(operand, QuantizedTensor):
        return 0
    pairs = ((operand.data, weight.codes), (operand.scale_inv, weight.scales))
    return sum(one.nbytes for one, own in pairs if one.untyped_storage()._cdata == own.untyped_storage()._cdata)


def in_high_precision(weight: Tensor) -> Tensor:
    """The weight itself, or its numbers where it is stored only as codes; gradients pass."""
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


def stored_as(tensor: Tensor) -> QuantizationSpec | None:
    """How a weight, or FSDP2's shard of one, is stored; None: as it is."""
    own = getattr(tensor, "_local_tensor", tensor)
    return own.spec if isinstance(own, QuantizedWeight) else None
