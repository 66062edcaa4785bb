"""TransformerEngine's optimizers on those of `ottava.optim`, and its functions of lists of tensors."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ottava import optim
from ottava.compat.transformer_engine.pytorch.refused import refuse
from ottava.weights.parameter import local

__all__ = [
    *("FusedAdam", "FusedSGD", "multi_tensor_applier", "multi_tensor_l2norm", "multi_tensor_scale"),
    "multi_tensor_unscale_l2norm",
]

_MOMENTS = MappingProxyType({torch.float32: "fp32", torch.bfloat16: "bf16", torch.uint8: "fp8"})


class FusedAdam(optim.AdamW):
    """`ottava.optim.AdamW` with TransformerEngine's arguments.

    Args:
        params, lr, betas, eps, weight_decay: as in torch's AdamW; weight_decay is 0 by default.
        master_weights: keep FP32 masters.
        store_param_remainders: store each master as the BF16 weight and a remainder of 16 bits.
        exp_avg_dtype, exp_avg_sq_dtype: torch.float32, bfloat16, or uint8 for FP8; the same dtype for both.
    Raises:
        NotImplementedError: ottava lacks the argument's value (adam_w_mode=False, bias_correction=False, moments of two
            dtypes or in float16, ...). The message names a replacement.

    Example:
        >>> layer = torch.nn.Linear(4, 4)
        >>> FusedAdam(layer.parameters(), lr=1e-3, master_weights=True).defaults["master"]
        'fp32'
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        capturable: bool = False,
        master_weights: bool = False,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
        **others: Any,
    ) -> None:
        refuse("FusedAdam", {"amsgrad": amsgrad, **others})
        if exp_avg_dtype != exp_avg_sq_dtype or exp_avg_dtype not in _MOMENTS:
            raise NotImplementedError(
                f"FusedAdam: got exp_avg_dtype={exp_avg_dtype} and exp_avg_sq_dtype={exp_avg_sq_dtype}; needs the same "
                "dtype for both: torch.float32, torch.bfloat16, or torch.uint8 for FP8"
            )
        master: Any = ("remainder" if store_param_remainders else "fp32") if master_weights else None
        moments: Any = _MOMENTS[exp_avg_dtype]
        super().__init__(params, lr, betas, eps, weight_decay, master=master, moments=moments, capturable=capturable)


class FusedSGD(optim.SGD):
    """`ottava.optim.SGD` with TransformerEngine's arguments.

    Raises:
        NotImplementedError: dampening, or weight decay after the momentum.

    Example:
        >>> FusedSGD(torch.nn.Linear(4, 4).parameters(), lr=0.1, momentum=0.9).defaults["momentum"]
        0.9
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **others: Any,
    ) -> None:
        refuse("FusedSGD", {"dampening": dampening, **others})
        super().__init__(params, lr, momentum, weight_decay, nesterov)


def multi_tensor_applier(op: Any, noop_flag_buffer: Tensor, tensor_lists: list[list[Any]], *args: Any) -> Any:
    """Calls one of the functions below with lists of tensors; DTensors as this rank's parts, empty tensors left out.

    Raises:
        RuntimeError: lists of unlike lengths.
    """
    if len({len(tensors) for tensors in tensor_lists}) != 1:
        raise RuntimeError(
            f"multi_tensor_applier: got lists of {[len(one) for one in tensor_lists]} tensors; needs as many in each"
        )
    kept = [i for i, tensor in enumerate(tensor_lists[0]) if tensor.numel()]
    lists = [[local(tensors[i]) for i in kept] for tensors in tensor_lists]
    return op(0, noop_flag_buffer, lists, *args) if kept else None


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: float) -> None:
    """Writes scale times each tensor of the first list into the second; the flag becomes 1 if one is not finite.

    Example:
        >>> flag, x = torch.zeros(1, dtype=torch.int32), torch.ones(2)
        >>> multi_tensor_scale(0, flag, [[x], [x]], 0.5)
        >>> x, flag
        (tensor([0.5000, 0.5000]), tensor([0], dtype=torch.int32))
    """
    with torch.no_grad():
        for source, target in zip(*tensor_lists, strict=True):
            wide = source.float() * scale
            target.copy_(wide)
            noop_flag.logical_or_(~wide.isfinite().all())


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """fp32: the 2-norm of all tensors together (1,), and of each tensor if per_tensor, else none.

    Example:
        >>> multi_tensor_l2norm(0, torch.zeros(1), [[torch.tensor([3.0]), torch.tensor([4.0])]], True)
        (tensor([5.]), tensor([3., 4.]))
    """
    return multi_tensor_unscale_l2norm(chunk_size, noop_flag, tensor_lists, torch.ones(()), per_tensor)


def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], inv_scale: Tensor, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """`multi_tensor_l2norm` of the tensors times inv_scale, which stay as they are."""
    norms = [torch.linalg.vector_norm(t.detach(), dtype=torch.float32) for t in tensor_lists[0]]
    each = torch.stack(norms) * inv_scale.to(norms[0].device)
    return torch.linalg.vector_norm(each).view(1), each if per_tensor else each[:0]
