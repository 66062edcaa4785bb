"""Says how Triton's kernels run in these tests: on the device, or interpreted where there is no GPU.

Imported first of all, because Triton reads TRITON_INTERPRET when it is imported, and torch imports it on occasion.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")


@contextmanager
def never_waits() -> Iterator[None]:
    """An error where the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def with_triton() -> list[pytest.MarkDecorator]:
    """Readies Triton for the tests of a module, and gives their marks; skips them where it has no build."""
    pytest.importorskip("triton", reason="Triton has no build for this machine")
    if not ON_GPU:
        from kernels.triton import interpreter

        interpreter.install()
    return [pytest.mark.gpu] if ON_GPU else []
