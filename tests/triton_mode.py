"""Says how Triton's kernels run in these tests: on the device, or interpreted where there is no GPU.

Imported first of all, because Triton reads TRITON_INTERPRET when it is imported, and torch imports it on occasion.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
