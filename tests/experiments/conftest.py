"""A process that has compiled code records gradients in place of the loss; tests before these may have compiled."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _nothing_is_compiled() -> None:
    """Forgets the code that torch has compiled for tests before."""
    if "torch._dynamo" in sys.modules:
        import torch._dynamo

        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
