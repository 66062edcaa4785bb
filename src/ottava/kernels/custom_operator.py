"""Makes a function an operator that torch.compile sees as one opaque node.

`torch.library.custom_op` does the same with ten more Python calls around each of ours, three times the price: a layer
has seven operators a step, and its GEMMs are short where it is small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Run = TypeVar("Run", bound=Callable[..., Any])


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
