"""Random states come back bit for bit."""

from __future__ import annotations

import pytest
import torch

from ottava.record.random_state import random_states, random_states_kept, set_random_states


def test_work_inside_leaves_no_trace() -> None:
    torch.manual_seed(3)
    want = torch.rand(4)
    torch.manual_seed(3)
    with random_states_kept():
        torch.rand(100)
    assert torch.equal(torch.rand(4), want)


def test_also_after_an_exception() -> None:
    torch.manual_seed(3)
    with pytest.raises(RuntimeError), random_states_kept():
        torch.rand(100).reshape(7, 7)
    first = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4), first)


def test_starts_from_the_states_that_are_given() -> None:
    torch.manual_seed(5)
    states = random_states()
    want = torch.rand(4)
    torch.manual_seed(6)
    with random_states_kept(states):
        assert torch.equal(torch.rand(4), want)


def test_states_of_devices_that_are_not_here_are_passed_over() -> None:
    states = random_states()
    want = torch.rand(4)
    set_random_states({**states, "cuda:99": states["cpu"]})
    assert torch.equal(torch.rand(4), want)
