"""Where the host would wait for a GPU: each number that Python reads of a tensor, and operators whose size is a number.

Counted on a CPU; `torch.cuda.set_sync_debug_mode` says the same on a device (tests/nn/test_launches.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ottava
from ottava.nn.attention import read_once

READS = {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"}
"""Methods that hand numbers to Python."""
SIZED = {"_local_scalar_dense", "nonzero", "bincount", "masked_select", "_unique2", "unique_consecutive"}
"""Operators for which torch waits itself, because a number decides their size."""


class Waits(TorchDispatchMode):
    """Notes operators, also those of a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        unsized = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        indices = args[1] if name in ("index", "index_put_") else ()
        masked = any(index is not None and index.dtype == torch.bool for index in indices)
        if name in SIZED or unsized or masked:
            self.seen.append("nonzero" if masked else name)
        return func(*args, **(kwargs or {}))


class Reads(TorchFunctionMode):
    """Notes methods: on a CPU they call no operator."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := getattr(func, "__name__", "")) in READS:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def waits() -> Iterator[list[str]]:
    """What a block waits for."""
    with Waits() as operators, Reads(operators.seen):
        yield operators.seen


@pytest.mark.parametrize(
    ("wait", "name"),
    [
        (lambda x: x.tolist(), "tolist"),
        (lambda x: bool(x[0]), "__bool__"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 1], "nonzero"),
        (lambda x: x.bincount(), "bincount"),
        (lambda x: x.repeat_interleave(x), "repeat_interleave"),
    ],
)
def test_a_wait_is_seen(wait: Any, name: str) -> None:
    """The detector itself."""
    with waits() as seen:
        wait(torch.arange(3))
    assert name in seen
    with waits() as seen:
        torch.arange(3).repeat_interleave(torch.arange(3), output_size=3)
    assert seen == []


def step(layer: torch.nn.Module, *inputs: Tensor, **more: Any) -> list[str]:
    """The waits of a warm forward and backward."""
    for _ in range(2):
        layer(*inputs, **more).sum().backward()
    with waits() as seen:
        layer(*inputs, **more).sum().backward()
    return seen


@pytest.mark.usefixtures("native_first")
@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "blockwise", "mxfp8"])
def test_experts_wait_once_a_layer(recipe: str) -> None:
    """For the rows of each expert; with a capacity too. Given sizes as numbers, a stack waits for nothing."""
    x = torch.randn(24, 32).bfloat16().requires_grad_()
    for capacity in (None, 1.0):
        moe = ottava.nn.MoE(32, 64, 4, 2, recipe=recipe, capacity_factor=capacity, dtype=torch.bfloat16)
        assert step(moe, x) == ["tolist"]
    layer = ottava.nn.GroupedLinear(3, 32, 16, recipe=recipe, dtype=torch.bfloat16)
    assert step(layer, x, [10, 0, 14]) == []


@pytest.mark.usefixtures("native_first")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "delayed", "mxfp8"])
def test_a_linear_waits_for_nothing(recipe: str) -> None:
    """Forward and backward."""
    layer = ottava.nn.Linear(32, 16, recipe=recipe, dtype=torch.bfloat16)
    assert step(layer, torch.randn(24, 32).bfloat16().requires_grad_()) == []


def test_packed_sequences_are_read_once_a_batch() -> None:
    """Not in each layer; another batch, and numbers written in place, are read anew, with the right cuts."""
    q, k, v = (torch.randn(12, 2, 16).requires_grad_() for _ in range(3))
    layers = [ottava.nn.DotProductAttention(layout="thd") for _ in range(3)]
    ends = torch.tensor([0, 5, 12])
    with waits() as seen:
        first = [layer(q, k, v, cu_seqlens=ends) for layer in layers]
        first[0].sum().backward()
    assert seen == ["tolist"]
    for other in (torch.tensor([0, 5, 12]), ends.copy_(torch.tensor([0, 3, 12]))):
        with waits() as seen:
            y = layers[0](q, k, v, cu_seqlens=other)
        assert seen == ["tolist"]
        assert torch.equal(y, first[0]) == (other is not ends)
    assert read_once(ends) == [0, 3, 12]
