"""`@sweep`: one test that runs all its cases in a loop, and names the case that fails.

A parameter of the test that `AXES` names takes every registered value; keywords give further axes, and `DERIVED` makes
parameters of the values of axes. Every case starts from the same seed.

    @sweep(rounding=get_args(Rounding))
    def test_x(fmt: Format, rounding: Rounding, matrix: Tensor) -> None: ...

A case costs nothing beside its own work, where an item of pytest costs milliseconds.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import pytest
import torch

from layout_samples import LAYOUTS
from ottava.numerics import scaling
from ottava.numerics.formats import E4M3, FORMATS
from ottava.numerics.scaling import Granularity, ScaleFormat
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import RECIPES
from witnesses import ML_DTYPES, gfloat_info

EMPTY = ((0, 5, 16), (5, 0, 16), (5, 3, 0), (0, 0, 0))

_RAGGED = (Granularity(3, 5), Granularity(None, 4))  # nearly all of their blocks are cut off
GRANULARITIES = (*(value for value in vars(scaling).values() if isinstance(value, Granularity)), *_RAGGED)

SPECS = tuple(
    QuantizationSpec(E4M3, granularity, scale_format)
    for granularity in GRANULARITIES
    for scale_format in get_args(ScaleFormat)
    if not (scale_format == "e4m3" and granularity == scaling.PER_TENSOR)  # E4M3 scales belong to blocks
)

PAIRS = {
    f"{gemm.lhs} x {gemm.rhs}": (gemm.lhs, gemm.rhs)
    for recipe in RECIPES.values()
    for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad)
    if gemm.quantized and not (gemm.lhs.transform or gemm.rhs.transform)  # tests/numerics/test_transforms.py has those
}

CELLS = {
    name: [cell for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad) for cell in (gemm.lhs, gemm.rhs) if cell]
    for name, recipe in RECIPES.items()
}
CASTS = {str(cell): cell for cells in CELLS.values() for cell in cells if cell.transform is None}
"""Every cell of a registered recipe, once; a tally is of what was cast, so transforms change nothing in it."""
PLAIN = [name for name, cells in CELLS.items() if not any(c.transform or c.block_scale != "amax" for c in cells)]
"""Recipes whose casts have neither a transform nor a rule for block scales."""
FIXED = [name for name, cells in CELLS.items() if not any(getattr(c.transform, "signs", "") == "fresh" for c in cells)]
"""Recipes that draw no new signs for every cast of x and W."""

AXES: Mapping[str, Sequence[Any]] = {
    "fmt": tuple(FORMATS.values()),
    "recipe": tuple(RECIPES.values()),
    "scale_format": get_args(ScaleFormat),
    "granularity": GRANULARITIES,
    "spec": SPECS,  # every granularity with every scale format that goes with it, in E4M3; other formats by `replace`
    "pair": tuple(PAIRS.values()),  # (lhs, rhs) of every quantized GEMM of every registered recipe, each once
    "dtype": (torch.float32, torch.bfloat16, torch.float16),  # every dtype that is cast from
    "sizes": ((5, 3, 7), (16, 32, 128), (33, 17, 300), (1, 1, 1), (2, 130, 1), *EMPTY),  # (M, N, K)
    "layout": tuple(LAYOUTS.values()),  # makes a matrix: odd, whole blocks, transposed, strided, expanded, empty
}
"""Everything that is registered, so that a new entry is tested the day it is added."""


DERIVED: Mapping[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "matrix": (("layout", "dtype"), lambda layout, dtype: layout(dtype)),
    "ml_dtypes_type": (("fmt",), lambda fmt: ML_DTYPES[fmt.name]),
    "gfloat_info": (("fmt",), lambda fmt: gfloat_info(fmt.name)),
}
"""What is made of the values of some axes."""


def shown(value: Any) -> Any:
    """A layout by its name, everything else as it prints."""
    return next((name for name, make in LAYOUTS.items() if make is value), value)


def sweep(test: Callable[..., None] | None = None, /, **axes: Iterable[Any] | None) -> Any:
    """Run a test once for each combination of its axes. Its other parameters, and axes given as None, are pytest's."""
    if test is None:
        return functools.partial(sweep, **axes)
    signature = inspect.signature(test).parameters
    left = {name for name, given in axes.items() if given is None}  # pytest gives their values
    axes = {name: given for name, given in axes.items() if given is not None}
    parameters = {name: parameter for name, parameter in signature.items() if name not in left}
    derived = {name: DERIVED[name] for name in parameters if name in DERIVED}
    known = {name: tuple(axes[name] if name in axes else AXES[name]) for name in AXES if name in parameters}
    needed = dict.fromkeys(name for sources, _ in derived.values() for name in sources)
    values = {name: tuple(axes.get(name, AXES.get(name, ()))) for name in needed} | known
    values |= {name: tuple(given) for name, given in axes.items() if name not in values}
    assert values, f"{test.__name__}: no axis"
    assert all(values.values()), f"{test.__name__}: an axis has no value"

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        skipped, total = [], 0
        for case in itertools.product(*values.values()):
            chosen = dict(zip(values, case, strict=True))
            given = {name: value for name, value in chosen.items() if name in parameters}
            total += 1
            torch.manual_seed(0)
            try:
                for name, (sources, make) in derived.items():
                    given[name] = make(*(chosen[source] for source in sources))
                test(**fixtures, **given)
            except pytest.skip.Exception as skip:
                skipped.append(str(skip))
            except Exception as error:
                error.add_note(f"in the case {', '.join(f'{name}={shown(value)}' for name, value in chosen.items())}")
                raise
        if len(skipped) == total:
            pytest.skip("; ".join(dict.fromkeys(skipped)))

    rest = [parameter for name, parameter in signature.items() if name not in {*values, *derived}]
    run.__signature__ = inspect.Signature(rest)  # type: ignore[attr-defined]
    return run
