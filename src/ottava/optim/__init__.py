"""Optimizers that keep less: 8-bit moments, 16-bit masters, weights in FP8 (docs/memory.md).

    optimizer = ottava.optim.AdamW(model.parameters(), lr=1e-3, master="remainder", moments="fp8")

They are torch optimizers: groups, schedulers, closures, GradScaler and state dicts work as torch's.
"""

from ottava.optim.adamw import AdamW
from ottava.optim.gradients import accumulate_fp32
from ottava.optim.lion import Lion
from ottava.optim.muon import Muon
from ottava.optim.sgd import SGD
from ottava.optim.warmup import rewarm

__all__ = ["SGD", "AdamW", "Lion", "Muon", "accumulate_fp32", "rewarm"]
