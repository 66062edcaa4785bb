"""Proofs about other people's numerics: certificates, differences, orders of additions, audits of cards."""

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ottava.base import first_use

if TYPE_CHECKING:  # for type checkers what _HOMES is for Python
    from ottava.prove.adapters import adapter
    from ottava.prove.audit import Audit
    from ottava.prove.order import reveal
    from ottava.prove.prover import Subject, Verdict, check
    from ottava.prove.recorder import StepRecorder, StepRecording

_HOMES = MappingProxyType(
    {
        "ottava.prove.adapters": ("adapter",),
        "ottava.prove.audit": ("Audit",),
        "ottava.prove.order": ("reveal",),
        "ottava.prove.prover": ("Subject", "Verdict", "check"),
        "ottava.prove.recorder": ("StepRecorder", "StepRecording"),
    }
)

__all__ = ["Audit", "StepRecorder", "StepRecording", "Subject", "Verdict", "adapter", "check", "reveal"]


def __getattr__(name: str) -> Any:
    return first_use(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
