"""A parameter that is stored only as FP8 codes and scales: `QuantizedWeight`.

To autograd, optimizers, DDP, FSDP2 and state dicts it is a parameter of its outer dtype; in memory it is `codes` and
`scales`. It supports the few operations that training needs: moving, copying, sharding, filling. It refuses all
others by name, so that nothing dequantizes a weight silently. Its door (`quantizer.WeightQuantizer`) hands the stored
codes to both GEMMs. `requantize_` stores new numbers, usually from an optimizer's master copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ottava.casts import dequantize, quantize
from ottava.errors import need
from ottava.quantized_tensor import Lent, QuantizationSpec, QuantizedTensor
from ottava.scaling import PER_TENSOR, read_scales
from ottava.weight_dispatch import OPERATIONS, Coded, describe, each_part, refuse
from ottava.weight_storage import FLOATS, check_storage, scale_dtype, store_scales, stored_spec

_Sizes = tuple[int, ...]


class QuantizedWeight(Coded):
    """A weight (N, K), or a stack (G, N, K), that memory holds only as codes and scales.

    Args:
        codes: in spec.format.storage_dtype, contiguous; the shape of the weight.
        scales: one entry a block: spec.granularity.grid_shape((N, K)), with G in front for a stack; fp32, or uint8 with
            E8M0's exponents where the spec says so (`weight_storage`).
        spec: how it was cast; `stored_spec` of a recipe's cell.
        dtype: outer dtype, which other code and the gradient see: float32, bfloat16 or float16.
        requires_grad: as for any tensor.
        high_precision: the numbers before the cast, or None.
        matrix: the shape of the whole weight, if this one is a flat view.
        group, sent, lent, kept: as `Coded` says; a view shares `kept` with what it is a view of.
    Raises:
        TypeError, ValueError: codes, scales or dtype do not fit.

    In-place operations that write new numbers cast them: `copy_` from a plain tensor, the fills of torch.nn.init, and
    `mul_`, `clamp_` and the like with numbers. `w.copy_(w.dequantize())` changes no bit. Norms, extremes, comparisons
    and the like read the dequantized numbers. Arithmetic with tensors raises NotImplementedError.

    Example:
        >>> from ottava.formats import E4M3
        >>> weight = quantized_weight(torch.tensor([[0.5, -3.0], [14.0, 7.0]]), QuantizationSpec(E4M3))
        >>> weight.dtype, weight.codes.dtype, weight.dequantize()[1]
        (torch.float32, torch.float8_e4m3fn, tensor([14.,  7.]))
    """

    @staticmethod
    def __new__(
        cls: type[QuantizedWeight],
        codes: Tensor,
        scales: Tensor,
        spec: QuantizationSpec,
        dtype: torch.dtype,
        *,
        requires_grad: bool = False,
        high_precision: Tensor | None = None,
        matrix: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        sent: bool = False,
        lent: Lent | None = None,
        kept: list[Tensor | None] | None = None,
    ) -> QuantizedWeight:
        check_storage(codes, scales, spec, dtype, tuple(matrix or codes.shape))
        weight: QuantizedWeight = Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=dtype, device=codes.device, requires_grad=requires_grad
        )
        weight.codes, weight.scales, weight.spec = codes, scales, spec
        weight.kept, weight.matrix = [high_precision] if kept is None else kept, tuple(matrix or codes.shape)
        weight.group, weight.sent, weight.lent = group, sent, lent
        return weight

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own way

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls a classmethod
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        handler = OPERATIONS.get(str(func))
        if torch.is_inference_mode_enabled():  # torch takes no operation apart there, and refuses views made there
            if handler is None and (made := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
                return made
            with torch.inference_mode(False), torch.no_grad():
                return cls.__torch_dispatch__(func, types, args, kwargs)
        return (handler or refuse)(func, *args, **(kwargs or {}))

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """code * scale_inv in fp32, rounded once to `dtype` (its own by default), as a plain tensor.

        Gradients pass through it unchanged.
        """
        return _Dequantize.apply(self, dtype or self.dtype)  # type: ignore[no-any-return]

    @torch.no_grad()
    def requantize_(self, values: Tensor, *, amax: Tensor | None = None) -> None:
        """Casts new numbers into its storage, in place; its version moves on, so that nothing made of it stays in use.

        Codes are made of `values` rounded to the outer dtype: a BF16 weight with an fp32 master casts the same
        numbers, so training has the same bits with either. An fp32 weight is cast from fp32.

        Args:
            values: its shape, any float dtype.
            amax: fp32, one entry: the largest magnitude of the values in the outer dtype, where the caller knows it.
                Rows and blocks find their own. A smaller one saturates.
        Raises:
            TypeError: no tensor.  ValueError: another shape.
        Edge cases: as in every cast, NaN stays NaN and an infinity becomes NaN. A block with either has scale 1, so its
            small numbers lose bits; in a format without NaN all of it is NaN. Nothing is raised, since that would wait
            for a GPU.
            The shards of one weight under FSDP2 share the scale of a whole tensor, so there every rank has to call it
            (one all-reduce of a number).
        """
        need("requantize_", values, Tensor, f"a tensor {tuple(self.shape)} of the new numbers")
        if values.shape != self.shape:
            raise ValueError(f"requantize_: got {tuple(values.shape)} for {describe(self)}; needs {tuple(self.shape)}")
        values = values.detach().to(device=self.device, dtype=self.dtype)
        if not self.is_meta:
            rows = values.view(self.matrix)
            known = self._known_amax(rows, amax)
            given = None if known is None else self.spec.scale_of(known)
            for (codes, scales), part in zip(
                self._stored(), rows.unbind() if rows.dim() == 3 else (rows,), strict=True
            ):
                cast = quantize(part, self.spec, scale=None if given is None else given.scale)
                codes.copy_(cast.data)
                scale_inv = (
                    cast.scale_inv if given is None else given.scale_inv.maximum(cast.scale_inv)
                )  # NaN of either
                scales.copy_(store_scales(scale_inv, self.spec))
        if self.high_precision is not None:
            self.high_precision = _kept(values).view(self.matrix)
        self.was_written()

    def drop_high_precision(self) -> None:
        """Frees the numbers before the cast; an optimizer calls it after it has made its master copy."""
        self.high_precision = None

    def share_memory_(self) -> QuantizedWeight:
        """Moves codes and scales into memory that processes share, as torch's."""
        self.codes.share_memory_(), self.scales.share_memory_()
        return self

    def quantized(self) -> QuantizedTensor:
        """The matrix as operands are: its codes and scales, sharing memory but for scales that are stored as bytes.

        Raises:
            ValueError: it is a stack; take one with `weight[i]`.
        """
        if len(self.matrix) != 2:
            raise ValueError(f"quantized: got {describe(self)}; needs one matrix: weight[i]")
        return QuantizedTensor(self.codes.view(self.matrix), self.scale_inv, self.spec, self.dtype)

    @property
    def data(self) -> QuantizedWeight:
        """The same codes and scales without a graph, as torch's."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, values: Tensor) -> None:
        need("weight.data", values, Tensor, "a tensor of numbers or codes")
        if (values.shape, values.dtype, values.device) != (self.shape, self.dtype, self.device):
            raise ValueError(
                f"weight.data: got {tuple(values.shape)} {values.dtype} on {values.device} for {describe(self)}, "
                f"{self.dtype} on {self.device}, which it stays. Use model.to(...) for another device or dtype"
            )
        with torch.no_grad():
            self.copy_(values)

    @property
    def scale_inv(self) -> Tensor:
        """fp32, one a block: the factor that dequantizes; the memory of `scales` where these are fp32."""
        return read_scales(self.scales)

    def like(self, codes: Tensor, scales: Tensor, **changes: Any) -> QuantizedWeight:
        """The same kind of weight with other codes and scales."""
        own = {"matrix": codes.shape, "group": self.group, "sent": self.sent, "dtype": self.dtype, "lent": self.lent}
        return QuantizedWeight(codes, scales, self.spec, **(own | changes))

    def _stored(self) -> list[tuple[Tensor, Tensor]]:
        """Codes and scales of each matrix."""
        codes = self.codes.view(self.matrix)
        return list(zip(codes, self.scales, strict=True)) if len(self.matrix) == 3 else [(codes, self.scales)]

    def _known_amax(self, values: Tensor, amax: Tensor | None) -> Tensor | None:
        """The amax to scale a whole tensor by, (1, 1) fp32; None: each cast finds its own."""
        if self.spec.granularity != PER_TENSOR or values.dim() != 2:
            return None
        if self.group is None:
            return None if amax is None else amax.to(torch.float32).reshape(1, 1)
        own = values.abs().amax() if amax is None and values.numel() else values.new_zeros(()) if amax is None else amax
        shared = own.to(torch.float32).reshape(1, 1).nan_to_num(torch.inf, torch.inf)  # collectives do not order NaN
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self.group)
        return shared

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # an attribute of torch's
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: _Sizes, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """The tensors that FSDP2 gathers of each shard: codes and scales, as bytes, which every backend moves."""
        self.group = mesh.get_group()
        if outer_size[0] != (shards := mesh.size()) * self.shape[0]:
            raise ValueError(
                f"fully_shard: {tuple(outer_size)} on {shards} ranks leaves shards of different sizes, which a "
                f"weight stored as {self.spec} cannot have. Take a number of ranks that divides {outer_size[0]}"
            )
        scales = (self.scales if self.scales_shard else self.scales[None]).contiguous()
        return (self.codes.view(torch.uint8), scales), scales

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The whole weight from the gathered tensors; it shares their memory."""
        if out is not None:  # it has this memory already
            return None
        data, *gathered = all_gather_outputs
        own = gathered[0] if gathered else metadata  # on one rank torch gathers the first tensor alone
        codes = data.view(self.spec.format.storage_dtype)
        scales = own if self.scales_shard else own[0]
        return self.like(codes, scales, group=None, dtype=param_dtype, lent=Lent()), all_gather_outputs

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], (self.spec, self.dtype, self.matrix, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], said: Any, size: Any, stride: Any) -> QuantizedWeight:
        spec, dtype, matrix, grad = said
        return QuantizedWeight(inner["codes"], inner["scales"], spec, dtype, requires_grad=grad, matrix=matrix)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"QuantizedWeight({tuple(self.shape)}, {self.spec}, {self.dtype}, device={str(self.device)!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedWeight:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        with torch.no_grad():
            copy = _as_it_was(each_part(torch.ops.aten.clone.default, self), self)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        said = self.spec.to_dict(), self.dtype, self.requires_grad, isinstance(self, nn.Parameter)
        codes = self.codes.view(torch.uint8)  # pickle knows no storage of float8
        return _rebuilt, (codes, self.scales, *said, self.high_precision, self.matrix)


def is_quantized_weight(tensor: Any) -> TypeGuard[QuantizedWeight]:
    """Whether a tensor is stored only as FP8 codes and scales.

    Example:
        >>> is_quantized_weight(torch.ones(2, 2))
        False
    """
    return isinstance(tensor, QuantizedWeight)


def quantized_weight(
    values: Tensor, spec: QuantizationSpec, *, keep_high_precision: bool = False, requires_grad: bool = False
) -> QuantizedWeight:
    """A weight with these numbers, stored only as codes and scales.

    Args:
        values: (N, K), or (G, N, K) for a stack of matrices with scales of their own; any device, also meta.
        spec: of the weight's cell; its scale is always that of the numbers that are stored, see `stored_spec`.
        keep_high_precision: keep a copy of the numbers on the CPU, for the master copy of an optimizer.
    Raises:
        TypeError: dtype.  ValueError: neither a matrix nor a stack.
    """
    spec, values = stored_spec(spec), values.detach()
    if values.dim() not in (2, 3) or values.dtype not in FLOATS:
        raise ValueError(
            f"quantized_weight: got {values.dtype} {tuple(values.shape)}; needs (N, K) or (G, N, K) in float32, "
            "bfloat16 or float16"
        )
    grid = (*values.shape[:-2], *spec.granularity.grid_shape((values.shape[-2], values.shape[-1])))
    codes = torch.empty(values.shape, dtype=spec.format.storage_dtype, device=values.device)
    scales = store_scales(torch.ones(grid, device=values.device, dtype=torch.float32), spec)
    weight = QuantizedWeight(codes, scales, spec, values.dtype)
    weight.requantize_(values)
    if keep_high_precision:
        weight.high_precision = _kept(values)
    return weight.requires_grad_(requires_grad)  # type: ignore[return-value]


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
        ctx.dtype = weight.dtype
        pairs = [(codes, read_scales(scales)) for codes, scales in weight._stored()]
        parts = [dequantize(QuantizedTensor(*pair, weight.spec, weight.dtype), dtype) for pair in pairs]
        whole = torch.stack(parts) if len(weight.matrix) == 3 else parts[0]
        return whole.view(weight.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


def _kept(values: Tensor) -> Tensor:
    return values.clone() if values.is_cpu or values.is_meta else values.cpu()


def _as_it_was(weight: Coded, other: QuantizedWeight) -> QuantizedWeight:
    if isinstance(other, nn.Parameter):
        return nn.Parameter(weight, other.requires_grad)  # type: ignore[return-value]
    return weight.requires_grad_(other.requires_grad)  # type: ignore[return-value]


def _rebuilt(
    codes: Tensor, scales: Tensor, spec: dict[str, Any], dtype: torch.dtype, requires_grad: bool, *rest: Any
) -> Any:
    (held, high_precision, matrix), own = rest, QuantizationSpec.from_dict(spec)
    codes = codes.view(own.format.storage_dtype)
    scales = scales if scales.dtype == scale_dtype(own) else store_scales(scales, own)  # of an earlier version
    made = QuantizedWeight(codes, scales, own, dtype, high_precision=high_precision, matrix=matrix)
    return nn.Parameter(made, requires_grad) if held else made.requires_grad_(requires_grad)
