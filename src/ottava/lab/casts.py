"""What one linear layer makes of a recipe: errors of its casts and of its three GEMMs, on data of four kinds.

The layer is an ordinary `nn.Linear` under the recipe, so transforms, kernels and accumulators are those of training.
Its operands are BF16 numbers, the truth is the fp64 product of these. Two draws read the same operands with other
random numbers of the recipe; e and e' are the errors of a result Y:

    error        |e| / |Y|
    systematic   <e, e'> / (|e| |e'|)     0 if two draws have no error in common: unbiased; 1: no chance in it
    shrink       -<e, Y> / <Y, Y>         the share that the result loses along itself; positive: it is too small

Y is rounded to BF16, so the recipe "bf16" shows what every other recipe has at least.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ottava.measure.layer_names import symbol
from ottava.measure.observer import observe
from ottava.measure.tally import PARTS
from ottava.nn.convert import convert
from ottava.recipe import GEMMS, Recipe

TOKENS, FEATURES = 256, 256
_HUGE_CHANNELS, _HUGE = 4, 50.0
DISTRIBUTIONS: Mapping[str, str] = MappingProxyType(
    {
        "normal": "N(0, 1)",
        "heavy-tailed": "Student's t with 3 degrees of freedom",
        "channel outlier": f"N(0, 1), {_HUGE_CHANNELS} of {FEATURES} channels times {_HUGE:g}",
        "gradient-like": "N(0, 1) times exp(2 g) for each token, g from N(0, 1), times 2**-14",
    }
)
"""What x and dy are drawn from; w is N(0, 1 / features)."""
OPERAND: Mapping[str, str] = MappingProxyType({name: "dY" if "gradient" in name else "X" for name in DISTRIBUTIONS})
"""The operand that a distribution is about."""


def drawn(name: str, generator: torch.Generator) -> Tensor:
    """A matrix (TOKENS, FEATURES) in BF16 of one of DISTRIBUTIONS.

    Example:
        >>> x = drawn("channel outlier", torch.Generator().manual_seed(0))
        >>> x.shape, bool(x.abs().amax() > 100)
        (torch.Size([256, 256]), True)
    """
    x = torch.randn(TOKENS, FEATURES, generator=generator)
    if name == "heavy-tailed":
        chi = torch.randn(3, TOKENS, FEATURES, generator=generator).square().mean(0)
        x = x / chi.sqrt()
    elif name == "channel outlier":
        x[:, torch.randperm(FEATURES, generator=generator)[:_HUGE_CHANNELS]] *= _HUGE
    elif name == "gradient-like":
        x = x * (2 * torch.randn(TOKENS, 1, generator=generator)).exp() * 2.0**-14
    return x.to(torch.bfloat16)


def measured(recipe: Recipe, seed: int) -> dict[str, Any]:
    """Errors by distribution: {"casts": {operand: {...}}, "gemms": {GEMM: {...}}}; see the module.

    Overrides of the recipe name layers of a model, so this layer takes the recipe's own cells.
    """
    return {name: _measured(replace(recipe, overrides=()), name, seed, i) for i, name in enumerate(DISTRIBUTIONS)}


def _measured(recipe: Recipe, name: str, seed: int, index: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(len(DISTRIBUTIONS) * seed + index)
    x, dy = drawn(name, generator), drawn(name, generator)
    layer = nn.Linear(FEATURES, FEATURES, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(FEATURES, FEATURES, generator=generator) * FEATURES**-0.5)
    w64, x64, dy64 = (t.detach().double() for t in (layer.weight, x, dy))
    convert(layer, recipe, filter=lambda *_: True)
    exact = {"fprop": x64 @ w64.t(), "dgrad": dy64 @ w64, "wgrad": dy64.t() @ x64}
    torch.manual_seed(2 * seed)  # the generator of a CPU looks at the low 32 bits only
    with observe(layer, detail="anatomy") as seen:
        first = _results(layer, x, dy)
    torch.manual_seed(2 * seed + 1)
    second = _results(layer, x, dy)
    casts = {symbol(row["tensor"], row["direction"]): _cast(row) for row in seen.table()}
    gemms = {gemm: compared(first[gemm], second[gemm], exact[gemm]) for gemm in GEMMS}
    return {"casts": casts, "gemms": gemms}


def _results(layer: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The three results in fp64."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    (w,) = layer.parameters()
    assert x.grad is not None
    assert w.grad is not None
    return {"fprop": y.detach().double(), "dgrad": x.grad.double(), "wgrad": w.grad.double()}


def _cast(row: Mapping[str, Any]) -> dict[str, float]:
    return {"sqnr_db": row["sqnr_db"], **{part: row[f"error_{part}_pct"] for part in PARTS}}


def compared(first: Tensor, second: Tensor, exact: Tensor) -> dict[str, float]:
    """error, systematic and shrink of two draws of a result.

    Example:
        >>> exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
        >>> compared(exact * 0.9, exact * 0.9, exact)
        {'error': 0.1, 'systematic': 1.0, 'shrink': 0.1}
    """
    e, other = first - exact, second - exact
    size, norms = float(exact.square().sum()), float(e.norm()) * float(other.norm())
    return {
        "error": round(math.sqrt(float(e.square().sum()) / size), 12),
        "systematic": round(float((e * other).sum()) / norms, 12) if norms else 0.0,
        "shrink": round(-float((e * exact).sum()) / size, 12),
    }
