"""Proofs about other people's numerics: where two programs stop being the same."""

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ottava.base import first_use

if TYPE_CHECKING:  # for type checkers what _HOMES is for Python
    from ottava.prove.prover import Side, Verdict, check
    from ottava.prove.recorder import Recorder, Recording

_HOMES = MappingProxyType(
    {
        "ottava.prove.prover": ("Side", "Verdict", "check"),
        "ottava.prove.recorder": ("Recorder", "Recording"),
    }
)

__all__ = ["Recorder", "Recording", "Side", "Verdict", "check"]


def __getattr__(name: str) -> Any:
    return first_use(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
