"""Weights that code outside nn.Linear multiplies, found by their shape: `convert` cannot reach them.

A receipt that counts nn.Linear alone would call a model FP8 whose attention or experts run in high precision. No module
declares which of its parameters it multiplies, so this is a judgement by shape, kind and name: matrices, and stacks of
matrices, that belong neither to a linear layer nor to a lookup, a norm or a convolution.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from ottava.engine.layer import quantized_layers

_NO_GEMM = (
    nn.Linear,  # counted as a layer
    nn.Embedding,
    nn.EmbeddingBag,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    _NormBase,
    _ConvNd,  # no GEMM of two dimensions, and no recipe for it
    ParametrizationList,  # its module has the weight that is computed
)
_ADDED = re.compile(
    r"bias|embed|(^|_)(pos|position|positions|token|tokens|table|mask|query|queries|latents?|norm|scales?|gamma|beta|log|"
    r"mix|decay|state|cache)(_|\d|$)",
    re.IGNORECASE,
)
"""Words in the names of parameters that modules add, look up or multiply element by element."""


@dataclass(frozen=True)
class Outside:
    """A weight that no layer multiplies."""

    name: str
    """Full name of the parameter."""
    shape: tuple[int, ...]
    elements: int
    reason: str
    """Why no recipe reaches it."""


def weights_outside(model: nn.Module) -> Iterator[Outside]:
    """The weights of a model that other modules than nn.Linear multiply, each once, in the order of the model.

    Edge cases: it leaves out convolutions, lookups, norms, parameters that are added by their name (pos_embed), weights
    that a linear layer or an embedding shares, and one-dimensional parameters (FSDP's flat ones), whose use is unknown.

    Example:
        >>> [(w.name, w.shape) for w in weights_outside(nn.MultiheadAttention(64, 2))]
        [('in_proj_weight', (192, 64))]
    """
    seen = {id(p) for m in model.modules() if isinstance(m, _NO_GEMM) for p in m.parameters(recurse=False)}
    seen |= {id(layer.parameter) for layer in quantized_layers(model)}
    for prefix, module in model.named_modules():
        if isinstance(module, _NO_GEMM) or "embedding" in type(module).__name__.lower():
            continue
        held = isinstance(module, nn.ParameterList | nn.ParameterDict)  # entries have no names of their own
        for own, parameter in module.named_parameters(recurse=False):
            label = f"{prefix.rpartition('.')[2]}_{own}" if held else own
            if id(parameter) in seen or is_lazy(parameter) or _ADDED.search(label) or not parameter.is_floating_point():
                continue
            shape = tuple(parameter.shape)
            if sum(size > 1 for size in shape) < 2 or len(shape) > 3:
                continue
            seen.add(id(parameter))
            name = f"{prefix}.{own}" if prefix else own
            yield Outside(name, shape, parameter.numel(), _reason(module, shape))


def _reason(module: nn.Module, shape: tuple[int, ...]) -> str:
    if "router" in type(module).__name__.lower():
        return "router: a rounding error changes which expert runs"
    stack = f"a stack of {shape[0]} matrices, " if len(shape) == 3 else ""
    return f"{stack}multiplied by {type(module).__name__} itself, a class that convert does not know"
