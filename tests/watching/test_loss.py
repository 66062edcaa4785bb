"""The loss, taken from where backward begins."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ottava.watching.loss import LossTap

BACKWARD, SCALE = torch.autograd.backward, torch.amp.GradScaler.scale


@pytest.fixture
def losses() -> Iterator[list[float]]:
    seen: list[float] = []
    tap = LossTap(lambda loss, share: seen.append(loss.item()))
    tap.attach()
    yield seen
    tap.detach()
    assert torch.autograd.backward is BACKWARD
    assert torch.amp.GradScaler.scale is SCALE


def leaf() -> Tensor:
    return torch.tensor([1.0, 2.0], requires_grad=True)


def test_sees_every_way_to_call_backward(losses: list[float]) -> None:
    leaf().sum().backward()
    torch.autograd.backward(leaf().sum() * 2)
    torch.autograd.backward(tensors=[leaf().sum() * 3, leaf().sum() * 4])
    (leaf() * 5)[0].reshape(1, 1).backward(torch.ones(1, 1))
    assert losses == [3, 6, 9, 12, 5]


def test_a_loss_that_a_number_divides_is_seen_under_a_dispatch_mode(losses: list[float]) -> None:
    with FlopCounterMode(display=False):
        (torch.nn.functional.mse_loss(leaf(), torch.zeros(2)) / 2).backward()
    assert losses == [1.25]


def test_what_is_no_loss_is_passed_over(losses: list[float]) -> None:
    leaf().backward(torch.ones(2))
    x = leaf()
    torch.autograd.grad(x.sum(), x)
    assert losses == []


def test_recomputation_calls_backward_too_and_is_no_loss(losses: list[float]) -> None:
    checkpoint(lambda x: x.sum(), leaf(), use_reentrant=True).backward()
    assert losses == [3]


def test_of_a_scaled_loss_the_loss_itself_is_seen(losses: list[float]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = leaf()
    scaler.scale(x.sum()).backward()
    assert losses == [3]
    assert torch.equal(x.grad, torch.full((2,), 1024.0))
    torch.amp.GradScaler("cpu", enabled=False).scale(leaf().sum() * 2).backward()
    assert losses == [3, 6]


def test_errors_of_backward_are_its_own(losses: list[float]) -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(()).backward()
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        leaf().backward()
    with pytest.raises(TypeError):
        torch.autograd.backward()  # type: ignore[call-arg]


def test_keeps_no_graph(losses: list[float]) -> None:
    x = leaf()
    lives = weakref.ref(x)
    loss = x.sum()
    torch.amp.GradScaler("cpu").scale(loss).backward()
    del x, loss
    gc.collect()
    assert lives() is None


def test_one_who_wraps_after_us_stays_wrapped() -> None:
    seen: list[Tensor] = []
    calls: list[str] = []
    tap = LossTap(lambda loss, share: seen.append(loss))
    tap.attach()
    ours = torch.autograd.backward

    def theirs(*args: Any, **kwargs: Any) -> None:
        calls.append("theirs")
        ours(*args, **kwargs)

    torch.autograd.backward = theirs
    try:
        tap.detach()
        assert torch.autograd.backward is theirs
        leaf().sum().backward()
        assert (calls, seen) == (["theirs"], [])
        tap.attach()
        leaf().sum().backward()
        assert len(seen) == 1
    finally:
        tap.detach()
        torch.autograd.backward = ours
        tap.detach()
    assert torch.autograd.backward is BACKWARD
