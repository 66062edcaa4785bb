"""Says how Triton's kernels run in these tests: on the device, or interpreted where there is no GPU.

Imported first of all, because Triton reads TRITON_INTERPRET when it is imported, and torch imports it on occasion.
"""

import os

import pytest
import torch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")


def with_triton() -> list[pytest.MarkDecorator]:
    """Readies Triton for the tests of a module, and gives their marks; skips them where it has no build."""
    pytest.importorskip("triton", reason="Triton has no build for this machine")
    if not ON_GPU:
        from kernels.triton import interpreter

        interpreter.install()
    return [pytest.mark.gpu] if ON_GPU else []
