"""The remedy for page faults, in a process of its own: there is no way back."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from ottava.kernels.memory import keep_freed_memory

def faults():
    x = torch.ones(20_000_000)                                  # 80 MB: mapped anew each time
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        x.clone()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults()
took = keep_freed_memory()
for _ in range(10):                                             # glibc fits an aligned tensor into what is free only
    faults()                                                    # where that is larger: a few calls widen the holes
print(took, before, faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's remedy")
def test_large_tensors_are_not_faulted_in_again() -> None:
    """A page is 4 KiB, or 2 MiB where the system makes huge ones; kept memory is not faulted in again."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=600)
    took, before, after = ran.stdout.split()
    if took == "False":
        pytest.skip("the C library is not glibc")
    assert int(after) < int(before) / 10
