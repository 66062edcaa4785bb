"""TransformerEngine's optimizers on those of `ottava.optim`."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from ottava import optim
from ottava.compat.transformer_engine.pytorch.refused import refuse

__all__ = ["FusedAdam", "FusedSGD"]

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
