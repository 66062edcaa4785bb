"""What torch.compile makes of a function: one opaque node of the graph, or a constant.

`torch.library.custom_op` does the same with ten more Python calls around each of ours, three times the price: a layer
has seven operators a step, and its GEMMs are short where it is small. `torch.compiler.assume_constant_result` imports
Dynamo, which takes longer than all of torch, and nobody may compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Run = TypeVar("Run", bound=Callable[..., Any])


def constant_in_graph(function: Run) -> Run:
    """Decorates what runs while torch.compile traces, and whose result, a plain constant, stands in the graph.

    As `torch.compiler.assume_constant_result`, which sets the same mark and imports Dynamo for it.

    Example:
        >>> @constant_in_graph
        ... def limit():
        ...     return 448
        >>> limit()
        448
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo's own name for the mark
    return function


def custom_operator(schema: str, fake: Callable[..., Any]) -> Callable[[Run], Run]:
    """Decorates what `torch.ops.ottava.NAME` runs, on any device; the function itself stays as it is.

    Args:
        schema: "NAME(Tensor x, str spec) -> Tensor" in torch's words. It may neither write to an argument nor return
            one, nor a tensor that it keeps: compiled code writes over results that it needs no more.
        fake: takes the same arguments, fake ones; gives tensors of the shapes, dtypes and strides that will come.
    Edge cases: no gradient flows through it. Used once for a name: torch refuses a second definition.

    Example:
        >>> def fake(x):
        ...     return torch.empty_like(x)
        >>> @custom_operator("doubled_for_the_example(Tensor x) -> Tensor", fake)
        ... def doubled(x):
        ...     return 2 * x
        >>> torch.ops.ottava.doubled_for_the_example(torch.ones(2))
        tensor([2., 2.])
    """
    name, bracket, rest = schema.partition("(")
    qualified = f"ottava::{name}"
    torch.library.define(qualified, bracket + rest, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(qualified, fake)

    def register(run: Run) -> Run:
        torch.library.impl(qualified, "default", run)
        return run

    return register
