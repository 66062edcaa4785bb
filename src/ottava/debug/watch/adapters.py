"""Where the operands of a layer's GEMMs are, by the name of its class: nothing of any framework is imported.

A layer is a call with an input, weights and an output. `ADAPTERS` says for each class which of them are the operands
X (M, K), W (N, K) and the result Y (M, N), and what cannot be seen from outside, with the reason. A new class is an
entry of that table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Part(NamedTuple):
    """One linear of a call."""

    suffix: str = ""
    """Added to the layer's name."""
    inputs: tuple[Tensor, ...] = ()
    """(..., K) each; several where the layer multiplies several tensors with this weight."""
    weight: Tensor | None = None
    """As the layer keeps it, see `Adapter.transposed`."""
    output: Tensor | None = None
    """(..., N)."""
    arrange: Callable[[Tensor], Tensor] | None = None
    """From a tensor like output to what this linear computed of it, in the order of its rows."""
    arrange_input: Callable[[Tensor], Tensor] | None = None
    """From a tensor like one of inputs to X, where that is not all of it."""
    arrange_weight: Callable[[Tensor], Tensor] | None = None
    """From a tensor like weight to W (N, K), where `Adapter.transposed` does not say it all."""
    cast: bool = True
    """torch.autocast reaches the operands."""


Call = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], Iterator[Part]]
"""(module, args, kwargs, output) -> the linears of that call."""
Weights = Callable[[Any], Iterator[tuple[str, Tensor]]]
"""module -> (suffix, weight) of each of its linears."""


@dataclass(frozen=True)
class Adapter:
    """How to read layers of a class."""

    call: Call
    weights: Weights
    package: str = ""
    """The class is of a package whose name starts so; needed where a class has a name that others use, too."""
    transposed: bool = False
    """The weight is kept as (K, N)."""
    why: str = ""
    """What is not seen, and why."""


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors directly in what a module takes or returns: itself, or those of a tuple, list or mapping."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (item for item in value.values() if isinstance(item, Tensor))
    elif isinstance(value, (tuple, list)):
        yield from (item for item in value if isinstance(item, Tensor))


def _first(*values: Any) -> Tensor | None:
    return next((tensor for value in values for tensor in tensors_of(value)), None)


def _one(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Iterator[Part]:
    """The first tensor in is X, `weight` is W, the first tensor out is Y."""
    x = _first(args, kwargs)
    weight = kwargs.get("weight")  # of Megatron's tied output layer
    weight = weight if isinstance(weight, Tensor) else getattr(module, "weight", None)
    yield Part("", () if x is None else (x,), weight, _first(output))


def _one_weight(module: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(weight := getattr(module, "weight", None), Tensor):
        yield "", weight
    else:  # the weight comes with the call
        yield "", torch.empty(0, 0)


def _normed(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Iterator[Part]:
    """The norm is inside: only W and Y are seen."""
    yield Part("", (), getattr(module, "weight", None), _first(output))


def _headed(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Iterator[Part]:
    """What comes out is a loss: only X and W are seen."""
    yield Part("", (args[0],) if args else (), getattr(module, "weight", None))


def _mlp(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Iterator[Part]:
    yield Part(".fc1", (), module.fc1_weight)
    yield Part(".fc2", (), module.fc2_weight, _first(output))


def _mlp_weights(module: Any) -> Iterator[tuple[str, Tensor]]:
    yield ".fc1", module.fc1_weight
    yield ".fc2", module.fc2_weight


def _grouped(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Iterator[Part]:
    """Rows of one input, split over one weight each."""
    x, y = _first(args, kwargs), _first(output)
    splits = kwargs.get("m_splits", args[1] if len(args) > 1 else None)
    if isinstance(splits, Tensor):
        splits = splits.tolist() if splits.device.type == "cpu" else None  # elsewhere reading it would wait
    weights = list(_grouped_weights(module))
    known = isinstance(splits, (list, tuple)) and len(splits) == len(weights) and x is not None
    start = 0
    for index, (suffix, weight) in enumerate(weights):
        if not known or x is None:
            yield Part(suffix, (), weight)
            continue
        take = partial(_rows, start=start, stop=start + int(splits[index]))
        yield Part(suffix, (take(x.detach()),), weight, y, take)
        start += int(splits[index])


def _rows(x: Tensor, start: int, stop: int) -> Tensor:
    return x.reshape(-1, x.shape[-1])[start:stop]


def _grouped_weights(module: Any) -> Iterator[tuple[str, Tensor]]:
    for index in range(module.num_gemms):
        yield f".{index}", getattr(module, f"weight{index}")


def _attention(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Iterator[Part]:
    """nn.MultiheadAttention: X and W of the projections in, W and Y of the one out."""
    named = {**dict(zip(("query", "key", "value"), args, strict=False)), **kwargs}
    given = [named[name] for name in ("query", "key", "value") if isinstance(named.get(name), Tensor)]
    y = _first(output)

    def ordered(x: Tensor) -> Tensor:
        # rows are (time, batch) inside, whatever they are outside
        return x.detach().transpose(0, 1) if x.dim() == 3 else x.detach()

    arrange = ordered if module.batch_first else torch.Tensor.detach
    different = [x for i, x in enumerate(given) if all(x is not earlier for earlier in given[:i])]
    if module.in_proj_weight is not None:
        yield Part(".in_proj", tuple(arrange(x) for x in different), module.in_proj_weight)
    else:
        for name, x in zip("qkv", given, strict=False):
            yield Part(f".{name}_proj", (arrange(x),), getattr(module, f"{name}_proj_weight"))
    yield Part(".out_proj", (), module.out_proj.weight, y, arrange)


def _attention_weights(module: Any) -> Iterator[tuple[str, Tensor]]:
    if module.in_proj_weight is not None:
        yield ".in_proj", module.in_proj_weight
    else:
        yield from ((f".{name}_proj", getattr(module, f"{name}_proj_weight")) for name in "qkv")
    yield ".out_proj", module.out_proj.weight


_TE = "transformer_engine"
_FUSED_NORM = "X: the norm is fused into the layer, what its GEMM gets is not seen from outside"
_FUSED_ACTIVATION = _FUSED_NORM.replace("norm", "activation")
_PLAIN = Adapter(_one, _one_weight)
ADAPTERS: Mapping[str, tuple[Adapter, ...]] = MappingProxyType(
    {
        "Linear": (Adapter(_one, _one_weight, "torch.nn."), Adapter(_one, _one_weight, _TE)),
        "MultiheadAttention": (
            Adapter(
                _attention,
                _attention_weights,
                "torch.nn.",
                why="dY of in_proj, X of out_proj: inside torch's attention function, which calls no module",
            ),
        ),
        "Conv1D": (Adapter(_one, _one_weight, transposed=True),),  # Hugging Face's GPT-2
        "Float8Linear": (_PLAIN,),  # torchao
        "ColumnParallelLinear": (_PLAIN,),  # Megatron returns (y, bias), fairscale y
        "RowParallelLinear": (_PLAIN,),
        # under a recipe that casts nothing; else their doors tell
        "NormLinear": (Adapter(_normed, _one_weight, "ottava.", why=_FUSED_NORM),),
        "ActivatedLinear": (Adapter(_normed, _one_weight, "ottava.", why=_FUSED_ACTIVATION),),
        "LinearCrossEntropy": (Adapter(_headed, _one_weight, "ottava.", why="Y, dY: its loss is inside the layer"),),
        "LayerNormLinear": (Adapter(_normed, _one_weight, _TE, why=_FUSED_NORM),),
        "LayerNormMLP": (Adapter(_mlp, _mlp_weights, _TE, why=f"{_FUSED_NORM}; nor is what is between fc1 and fc2"),),
        "GroupedLinear": (Adapter(_grouped, _grouped_weights, _TE),),
    }
)
"""Class name -> the adapters of classes of that name, told apart by their package."""


def adapter_of(module: nn.Module) -> Adapter | None:
    """The adapter of a layer: that of its own class or of the nearest base class which has one.

    Example:
        >>> class MyLinear(nn.Linear):
        ...     pass
        >>> adapter_of(MyLinear(2, 2)) is ADAPTERS["Linear"][0], adapter_of(nn.ReLU())
        (True, None)
    """
    for kind in type(module).__mro__:
        for adapter in ADAPTERS.get(kind.__name__, ()):
            if kind.__module__.startswith(adapter.package):
                return adapter
    return None
