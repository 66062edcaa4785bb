"""Global hooks that come and go: torch is left as it was, and compiled code does not notice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ottava.watching.operands import GlobalHooks


def hooks(seen: list[str]) -> GlobalHooks:
    def before(module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            seen.append(f"before {type(module).__name__}")

    def after(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> None:
        if not torch.compiler.is_compiling():
            seen.append(f"after {type(module).__name__}{list(kwargs)}")

    return GlobalHooks(before, after)


def registered() -> list[dict[int, Any]]:
    return [dict(value) for name, value in vars(torch_module).items() if name.startswith("_global_forward")]


@pytest.fixture(autouse=True)
def _torch_is_left_as_it_was() -> Iterator[None]:
    before = registered()
    yield
    assert registered() == before


def test_what_is_left_is_told_even_if_it_raised() -> None:
    left: list[tuple[str, bool]] = []
    pair = GlobalHooks(
        lambda module, args: None,
        lambda module, args, kwargs, output: None,
        lambda module, args, output: left.append((type(module).__name__, output is None)),
    )
    for _ in range(2):  # attached for the first time, and again
        pair.attach()
        nn.Sequential(nn.ReLU())(torch.ones(2))
        with pytest.raises(RuntimeError):
            nn.Sequential(nn.Linear(2, 2))(torch.ones(3))
        pair.detach()
        nn.ReLU()(torch.ones(2))
    assert left == 2 * [("ReLU", False), ("Sequential", False), ("Linear", True), ("Sequential", True)]


def test_are_called_while_attached() -> None:
    seen: list[str] = []
    pair, layer = hooks(seen), nn.Linear(2, 2)
    for _ in range(3):
        layer(torch.ones(1, 2))
        pair.attach()
        pair.attach()  # twice is once
        layer(input=torch.ones(1, 2))
        pair.detach()
        pair.detach()
    assert seen == ["before Linear", "after Linear['input']"] * 3


def test_keep_their_numbers() -> None:
    pair = hooks([])
    numbers = []
    for _ in range(3):
        pair.attach()
        numbers.append([list(found) for found in registered()])
        pair.detach()
        other = nn.modules.module.register_module_forward_hook(lambda *_: None)  # takes a number
        other.remove()
    assert numbers[0] == numbers[1] == numbers[2]


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "beside another's hook"])
def test_compiled_code_is_compiled_at_most_twice(others: int) -> None:
    """Once with them and once without. With a hook that is registered anew each time it is once a step."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    count = CompileCounter()
    strangers = [nn.modules.module.register_module_forward_pre_hook(lambda *_: None) for _ in range(others)]
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend=count)
    pair = hooks([])
    for step in range(6):
        if step % 3:
            pair.attach()
        model(torch.ones(2, 4)).sum().backward()
        pair.detach()
    for stranger in strangers:
        stranger.remove()
    torch._dynamo.reset()
    assert count.frame_count <= 2
