"""Opens saved traces: those of `ottava check --save`, and what other tools write.

ottava     rank0.json, rank0.safetensors
"""

from __future__ import annotations

from pathlib import Path

from ottava.prove.recorder import Recording


def load_trace(path: Path) -> Recording:
    """A saved trace.

    Raises:
        TraceError: nothing is there, or it cannot be read.
    """
    return Recording.load(path)
