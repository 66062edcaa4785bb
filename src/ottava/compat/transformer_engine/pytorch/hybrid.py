"""TransformerEngine's tensors whose rows and columns are cast by different quantizers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ottava.compat.transformer_engine.pytorch.tensors import NVFP4Tensor, QuantizedTensor, refuse_unlike
from ottava.numerics.scaling import PER_TENSOR
from ottava.numerics.tensor import QuantizedTensor as Codes


class HybridQuantizedTensor(QuantizedTensor):
    """Rows and columns by different quantizers, each direction a tensor of its own quantizer.

    `quantized_model_init` with a CustomRecipe whose factory gives a `HybridQuantizer` for weights stores them so.
    """

    hybrid = True
    _rowwise_storage = rowwise_sub_storage = property(lambda self: self._halves[0])
    _columnwise_storage = columnwise_sub_storage = property(lambda self: self._halves[1])
    _halves: list[QuantizedTensor | None]
    """Rows and columns; they hold the codes."""

    @staticmethod
    def __new__(cls, shape: Any = None, dtype: Any = None, *parts: Any, **theirs: Any) -> Any:
        """As `QuantizedTensor`, or of TransformerEngine's rowwise_storage and columnwise_storage, whose shape is the
        default; fake_dtype is another name of dtype."""
        if parts or "rowwise_storage" not in theirs:
            return QuantizedTensor.__new__(cls, shape, dtype, *parts, **theirs)
        row, column, quantizer = (theirs.get(n) for n in ("rowwise_storage", "columnwise_storage", "quantizer"))
        if not hasattr(quantizer, "columnwise_quantizer"):
            raise TypeError(f"{cls.__name__} requires a parent HybridQuantizer; got {quantizer!r}: give quantizer=")
        turned = column
        if column is not None and column.columns is None:  # rows alone: one scale serves both directions
            turned = column._like(column.shape, None, column.rows.t())
        halves = None if row is None else row.rows, None if turned is None else turned.columns
        first = column if row is None else row
        shape, dtype = shape or getattr(first, "shape", None), dtype or theirs.get("fake_dtype")
        return QuantizedTensor.__new__(cls, shape, dtype, *halves, quantizer, theirs.get("requires_grad", False))

    def _held(self, turned: bool) -> Codes | Tensor | None:
        half = self._halves[turned]
        return None if half is None else half._held(turned)

    def _put(self, turned: bool, codes: Codes | Tensor | None) -> None:
        halves = self.__dict__.setdefault("_halves", [None, None])
        half = halves[turned]
        if half is not None and codes is not None:
            half._put(turned, codes)
            return
        own = self._quantizer.columnwise_quantizer if turned else self._quantizer.rowwise_quantizer
        pair = (None, codes) if turned else (codes, None)
        halves[turned] = None if codes is None else own.tensor_class(self.shape, self.dtype, *pair, own)

    def _laid(self, turned: bool, part: int) -> Tensor | None:
        half = self._halves[turned]
        return None if half is None else half._laid(turned, part)

    def fsdp_pre_all_gather(
        self, mesh: Any, orig_size: Any, contiguous_orig_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        """What FSDP2 gathers of a shard: for each direction codes, and scales where they have rows of their own.

        Raises:
            NotImplementedError: NVFP4 codes, whose amax is that of a whole tensor.
            ValueError: ranks have different scales of a tensor.
        """
        parts: list[Tensor] = []
        for turned, name in ((False, "rowwise"), (True, "columnwise")):
            codes = self._held(turned)
            if isinstance(self._halves[turned], NVFP4Tensor):
                raise NotImplementedError(
                    f"HybridQuantizedTensor: the {name} sub-storage is an NVFP4Tensor, which has no "
                    "fsdp_buffer_fields: its codes belong to the amax of a whole tensor. Use a supported "
                    "sub-quantizer, or NVFP4 alone with square blocks"
                )
            held: list[Any] = [codes.data.view(torch.uint8), codes.scale_inv] if isinstance(codes, Codes) else [codes]
            if isinstance(codes, Codes) and codes.spec.granularity == PER_TENSOR:
                refuse_unlike(held.pop(), mesh, "scales", type(self).__name__)
            parts += [(part.t() if turned else part).contiguous() for part in held if part is not None]
        return tuple(parts), (self._held(False), self._held(True))

    def fsdp_post_all_gather(
        self, all_gather_outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Any, Any]:
        """The whole tensor, or out with new codes; and what FSDP2 frees."""
        left, rows = list(all_gather_outputs), 0
        halves: list[Any] = []
        for turned, shard in enumerate(metadata):
            if shard is not None:
                data = left.pop(0)
                rows, data = len(data), data.t().contiguous() if turned else data
                if isinstance(shard, Codes):
                    whole = shard.spec.granularity == PER_TENSOR
                    scales = shard.scale_inv if whole else left.pop(0).t().contiguous() if turned else left.pop(0)
                    data = replace(shard, data=data.view(shard.data.dtype), scale_inv=scales)
            halves.append(None if shard is None else data)
        if out is not None:
            out.rows, out.columns = halves
        made = out if out is not None else self._like((rows, *self.shape[1:]), halves[0], halves[1], param_dtype)
        return made, all_gather_outputs


HybridQuantizedTensorStorage = HybridQuantizedTensor
