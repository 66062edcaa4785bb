"""Predicts the memory of a training run before it runs: weights, gradients, masters, moments, activations.

It needs no formulas for the optimizer's share: a twin of the optimizer steps copies of the parameters on the meta
device, which have no memory, and the module adds up the bytes of the states. So it works for every optimizer of torch,
and the prediction equals the bytes after a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ottava.base.errors import need, need_type
from ottava.engine.functional import QuantizedLayer, quantized_layers
from ottava.nn.layer import rows_of
from ottava.nn.plan import TOKENS
from ottava.numerics.tensor import QuantizationSpec
from ottava.weights.parameter import is_quantized_weight, local, stored_spec

_MASTERS = ("master", "remainder")
_FP32 = 4


@dataclass(frozen=True)
class Memory:
    """Bytes of a model in training; see `memory`."""

    parameters: int
    """Elements of all parameters, each once."""
    weights: int
    """Bytes of the parameters: of codes and scales where they are stored in FP8."""
    kept: int
    """Bytes of the kept values before the cast of FP8 weights; an optimizer's first step frees them."""
    buffers: int
    """Bytes of the model's buffers, such as the histories of predicted scales."""
    gradients: int
    """Bytes of all gradients at the end of a backward."""
    masters: int
    """Bytes of the optimizer's copies of the weights."""
    moments: int
    """Bytes of the optimizer's other states, step counts included."""
    tokens: int
    """Rows of the activations in one forward."""
    activations: int
    """Bytes that linear layers keep from forward to backward for these tokens: the operand of each weight gradient."""
    weight_casts: int
    """Bytes of FP8 copies of weights that live from forward to backward, if every layer's input needs a gradient."""

    @property
    def state(self) -> int:
        """Bytes that live through the whole run: all but activations and casts of weights."""
        return self.weights + self.kept + self.buffers + self.gradients + self.masters + self.moments

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, bytes."""
        return {**vars(self), "state": self.state}

    def __str__(self) -> str:
        names = ("weights", "kept", "buffers", "gradients", "masters", "moments", "state")
        sizes: Mapping[str, int] = {name: getattr(self, name) for name in names}
        lines = [f"{self.parameters:,} parameters{'':21}bytes  per parameter"]
        lines += [
            f"  {name:12} {size:>26,} {size / max(1, self.parameters):>14.3f}" for name, size in sizes.items() if size
        ]
        if self.activations:
            each = self.activations / self.tokens
            lines.append(
                f"linear layers keep {self.activations:,} bytes for backward: {each:,.1f} a token of {self.tokens:,}"
            )
        if self.weight_casts:
            lines.append(f"and {self.weight_casts:,} bytes of cast weights")
        return "\n".join(lines)


def memory(model: nn.Module, optimizer: Optimizer | None = None, *, tokens: int = TOKENS) -> Memory:
    """The bytes that training keeps: of weights, gradients, masters and moments exactly, also before the first step.

    Args:
        model: on any device; the meta device needs no memory.
        optimizer: an optimizer of torch or of `ottava.optim` over its parameters; None: no optimizer.
        tokens: rows of the activations in one forward; they give the bytes that ottava's linear layers keep for
            backward. The prediction leaves out norms, attention and activation functions, and knows no torch.autocast:
            activations have the dtype of the weights.
    Raises:
        TypeError: the model is no nn.Module, the optimizer no torch optimizer, or tokens no whole number.
        ValueError: tokens below 1, an optimizer of another model, or one whose step needs a closure or reads numbers,
            as LBFGS and Adafactor do, before its first step.
    Edge cases: sharded parameters count with the shard of this process.

    Example:
        >>> import ottava
        >>> model = nn.Sequential(nn.Linear(256, 256, bias=False)).bfloat16()
        >>> report = ottava.convert(model, "tensorwise", weights="fp8")
        >>> optimizer = ottava.optim.AdamW(model.parameters(), master="remainder", moments="fp8")
        >>> found = ottava.memory(model, optimizer)
        >>> [round(size / found.parameters, 2) for size in (found.weights, found.masters, found.moments)]
        [1.0, 2.0, 2.08]
    """
    need("memory", model, nn.Module)
    if optimizer is not None:
        need("memory", optimizer, Optimizer, "a torch.optim.Optimizer, or None")
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if stepped.isdisjoint(map(id, model.parameters())):
            raise ValueError(
                "memory: the optimizer steps no parameter of this model; make it of model.parameters(), after the last "
                "change of the model"
            )
    need_type("memory: tokens", tokens, int)
    if tokens < 1:
        raise ValueError(f"memory: tokens is {tokens}; needs 1 or more")
    parameters = [local(parameter) for parameter in model.parameters()]
    masters = moments = 0
    freed = False
    for state in () if optimizer is None else _stepped(optimizer):
        sizes = {name: value.nbytes for name, value in state.items() if isinstance(value, Tensor)}
        masters += sum(size for name, size in sizes.items() if name in _MASTERS)
        moments += sum(size for name, size in sizes.items() if name not in _MASTERS)
        freed = freed or any(name in _MASTERS for name in sizes)
    kept = [p.high_precision for p in parameters if is_quantized_weight(p) and p.high_precision is not None]
    activations = [
        _kept(layer, rows_of(layer, tokens)) for layer in quantized_layers(model) if layer.weight.requires_grad
    ]
    return Memory(
        parameters=sum(parameter.numel() for parameter in parameters),
        weights=sum(parameter.nbytes for parameter in parameters),
        kept=0 if freed else sum(values.nbytes for values in kept),
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        gradients=sum(_gradient(parameter) for parameter in model.parameters() if parameter.requires_grad),
        masters=masters,
        moments=moments,
        tokens=tokens,
        activations=sum(activations),
        weight_casts=sum(_cast_weight(layer) for layer in quantized_layers(model)),
    )


def _stepped(optimizer: Optimizer) -> list[Mapping[str, Any]]:
    """An optimizer's state of each parameter after a step; on the meta device if it has made no step yet."""
    missing: list[dict[str, Any]] = []
    found: list[Mapping[str, Any]] = []
    for group in optimizer.param_groups:
        own = [parameter for parameter in group["params"] if parameter.requires_grad]
        found += [
            {name: local(value) for name, value in optimizer.state[parameter].items()}
            for parameter in own
            if parameter in optimizer.state
        ]
        fresh = [_on_meta(parameter) for parameter in own if parameter not in optimizer.state]
        if fresh:
            missing.append(
                {**group, "params": fresh, "fused": False} if "fused" in group else {**group, "params": fresh}
            )
    if missing:
        twin = object.__new__(type(optimizer))
        twin.__setstate__({"defaults": optimizer.defaults, "state": defaultdict(dict), "param_groups": missing})
        try:
            twin.step()
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"memory: the states of {type(optimizer).__name__} are not known before its first step ({error}). Make "
                "that step first, or ask for the model alone: ottava.memory(model)"
            ) from error
        found += twin.state.values()
    return found


def _on_meta(parameter: Tensor) -> nn.Parameter:
    own = local(parameter.detach())
    twin = nn.Parameter(own.to("meta"))
    twin.grad_dtype = None  # a gradient may have any dtype
    dtype = parameter.grad_dtype or parameter.dtype
    twin.grad = torch.empty(own.shape, dtype=dtype, device="meta")
    return twin


def _gradient(parameter: Tensor) -> int:
    dtype = parameter.grad_dtype or parameter.dtype
    count: int = local(parameter.detach()).numel()
    return count * dtype.itemsize


def _kept(layer: QuantizedLayer, tokens: int) -> int:
    """Bytes of the operand x.T (K, M) that a layer keeps for the gradient of its weight."""
    _, col = layer.resolved.cells("input")
    return _operand(layer.in_features, tokens, col, layer.weight.dtype)


def _cast_weight(layer: QuantizedLayer) -> int:
    """Bytes of the operand W.T (K, N) that a layer keeps, without memory that it shares with the weight."""
    _, col = layer.resolved.cells("weight")
    weight = layer.weight
    if col is None:
        return 0
    if is_quantized_weight(weight) and weight.spec == stored_spec(col) and weight.spec.granularity.transposes:
        return 0 if weight.codes.is_cpu else weight.codes.nbytes  # an accelerator's GEMMs want it turned
    return _operand(layer.in_features, layer.out_features, col, layer.weight.dtype)


def _operand(rows: int, cols: int, spec: QuantizationSpec | None, dtype: torch.dtype) -> int:
    if spec is None:
        return rows * cols * dtype.itemsize
    aside = None
    if spec.transform is not None:  # it may pad to whole groups, and keeps means, factors or a seed
        matrix = torch.empty(rows, cols, dtype=dtype, device="meta")
        aside = spec.transform.prepare(matrix, None)
        cols = spec.transform.apply(matrix, aside).shape[1]
    blocks = spec.granularity.grid_shape((rows, cols))
    codes = rows * cols * spec.format.storage_dtype.itemsize
    return codes + _FP32 * blocks[0] * blocks[1] + (0 if aside is None else aside.nbytes)
