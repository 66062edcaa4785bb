"""Decorators that make a function one opaque node of a compiled graph, or a constant in it.

`torch.library.custom_op` adds ten Python calls around each of ours, which takes three times as long. A layer runs seven
operators a step, and a small layer has short GEMMs. `torch.compiler.assume_constant_result` imports Dynamo, which takes
longer than all of torch, even if no code compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Run = TypeVar("Run", bound=Callable[..., Any])


def constant_in_graph(function: Run) -> Run:
    """Decorates a function that runs while torch.compile traces; its result becomes a constant of the graph.

    `torch.compiler.assume_constant_result` sets the same mark, but imports Dynamo.

    Example:
        >>> @constant_in_graph
        ... def limit():
        ...     return 448
        >>> limit()
        448
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo's own name for the mark
    return function


def custom_operator(schema: str, fake: Callable[..., Any], *tags: torch.Tag) -> Callable[[Run], Run]:
    """Makes a function the implementation of `torch.ops.ottava.NAME` on any device, and returns it unchanged.

    Args:
        schema: "NAME(Tensor x, str spec) -> Tensor", as torch writes it. The function must not write to an argument or
            return one. It must not keep its result either: compiled code overwrites results after their last use.
        fake: takes the same arguments as fake tensors; returns tensors with the shapes, dtypes and strides to expect.
        tags: what torch should know of it: two equal calls of a `nondeterministic_seeded` one are two results.
    Edge cases: no gradient flows through the operator. torch refuses a second definition of a name.

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
    # the pieces of `torch.library.custom_op`, without the wrappers that it puts around them: those are for operators
    # that mutate, alias or want a gradient
    torch.library.define(qualified, bracket + rest, tags=(torch.Tag.pt2_compliant_tag, *tags))
    torch.library.register_fake(qualified, fake)

    def register(run: Run) -> Run:
        torch.library.impl(qualified, "default", run)
        return run

    return register
