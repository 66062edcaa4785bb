"""Optimizers that keep less: 8-bit moments, 16-bit masters, weights in FP8 (docs/memory.md).

    optimizer = ottava.optim.AdamW(model.parameters(), lr=1e-3, master="remainder", moments="fp8")

They are torch optimizers: groups, schedulers, closures, GradScaler and state dicts work as torch's.
"""

from ottava.optim.engine import accumulate_fp32, rewarm
from ottava.optim.rules import SGD, AdamW, Lion, Muon

__all__ = ["SGD", "AdamW", "Lion", "Muon", "accumulate_fp32", "rewarm"]
