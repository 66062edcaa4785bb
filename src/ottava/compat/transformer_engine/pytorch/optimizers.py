"""TransformerEngine's optimizers on those of `ottava.optim`, and its functions of lists of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ottava import optim
from ottava.compat.transformer_engine.pytorch.refused import refuse
from ottava.optim.engine import State, widened
from ottava.optim.storage import join
from ottava.weights.parameter import local

__all__ = [
    *("FusedAdam", "FusedSGD", "MultiTensorApply", "multi_tensor_applier", "multi_tensor_l2norm"),
    *("multi_tensor_scale", "multi_tensor_scale_tensor", "multi_tensor_unscale_l2norm"),
]

_MOMENTS = MappingProxyType({torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "fp8"})


class FusedAdam(optim.AdamW):
    """`ottava.optim.AdamW` with TransformerEngine's arguments.

    Args:
        params, lr, betas, eps, weight_decay: as in torch's AdamW; weight_decay is 0 by default.
        master_weights: keep FP32 masters.
        store_param_remainders: store each master as the BF16 weight and a remainder of 16 bits.
        master_weight_dtype: torch.float32; or torch.float16, whose 16 bits are spent on such remainders.
        use_decoupled_grad: a step reads `parameter.decoupled_grad`, of any dtype, and not `.grad`.
        exp_avg_dtype, exp_avg_sq_dtype: torch.float32, bfloat16, float16 with scales, or uint8 for FP8.
    Raises:
        NotImplementedError: ottava lacks the argument's value (adam_w_mode=False, bias_correction=False, ...). The
            message names a replacement.

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
        use_decoupled_grad: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        **others: Any,
    ) -> None:
        short = master_weight_dtype == torch.float16
        refuse("FusedAdam", {"amsgrad": amsgrad, "master_weight_dtype": master_weight_dtype, **others})
        for name, dtype in (("exp_avg_dtype", exp_avg_dtype), ("exp_avg_sq_dtype", exp_avg_sq_dtype)):
            if dtype not in _MOMENTS:
                raise NotImplementedError(
                    f"FusedAdam: {name}={dtype} is not in ottava; needs torch.float32, torch.bfloat16, torch.float16, "
                    "or torch.uint8 for FP8"
                )
        self.remainders = store_param_remainders
        moments: Any = _MOMENTS[exp_avg_dtype]
        self.kept = State("exp_avg"), State("exp_avg_sq", _MOMENTS[exp_avg_sq_dtype])
        master: Any = ("remainder" if store_param_remainders or short else "fp32") if master_weights else None
        super().__init__(params, lr, betas, eps, weight_decay, master=master, moments=moments, capturable=capturable)
        self.gradient = "decoupled_grad" if use_decoupled_grad else "grad"
        self.register_step_post_hook(_count)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; an error about remainders names the argument that asked for them."""
        try:
            super().add_param_group(param_group)
        except ValueError as error:
            asked = "store_param_remainders=True" if self.remainders else "master_weight_dtype=torch.float16"
            told = str(error).replace("master='remainder'", f"FusedAdam: {asked}")
            raise ValueError(told.replace("use master='fp32'", "leave it out, and masters are FP32")) from None

    def states(self, group: Mapping[str, Any]) -> tuple[State, ...]:
        """The two means, each in its own dtype."""
        return self.kept

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, of both gradients."""
        super().zero_grad(set_to_none)
        for parameter in (one for group in self.param_groups for one in group["params"]):
            if getattr(parameter, "decoupled_grad", None) is not None:
                parameter.decoupled_grad = None if set_to_none else parameter.decoupled_grad.zero_()

    def get_unscaled_state(self, param: Tensor, state_name: str, skip_unscale: bool = False) -> Tensor:
        """A state of a parameter in FP32: "exp_avg", "exp_avg_sq" or "master_param"; of store_param_remainders the
        remainders, int16."""
        state = {name: local(value) for name, value in self.state[param].items()}
        master = state.get("remainder", state.get("master", param))
        if "remainder" in state and not self.remainders:
            master = join(local(param).detach(), master)
        found: Tensor = (widened(state) | {"master_param": master})[state_name]
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As `ottava.optim.AdamW`'s; takes TransformerEngine's, whose groups count the steps, too."""
        groups, state = state_dict.get("param_groups", ()), state_dict.get("state", {})
        steps = {key: group["step"] for group in groups for key in group["params"] if "step" in group}
        if any("master_param" in one or ("step" not in one and one) for one in state.values()):
            state = {key: {"step": steps.get(key, 0), **_ours(one)} for key, one in state.items()}
        super().load_state_dict({**state_dict, "state": state})


def _count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Counts the steps of each group where TransformerEngine does."""
    for group in optimizer.param_groups:
        group["step"] = group.get("step", 0) + 1


def _ours(state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state of TransformerEngine under our names."""
    master = state.get("master_param")
    own = {name: value for name, value in state.items() if name != "master_param"}
    return own if master is None else own | {"remainder" if master.dtype == torch.int16 else "master": master}


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


def MultiTensorApply(chunk_size: int) -> Any:
    """`multi_tensor_applier`; the size of its chunks changes nothing."""
    return multi_tensor_applier


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: float | Tensor
) -> None:
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


multi_tensor_scale_tensor = multi_tensor_scale  # its factor may be a tensor


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
