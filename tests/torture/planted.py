"""Faults for each attack: planted in every fork but the witness, an attack must report them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A fault of ottava's that an attack must find."""

    attack: str
    name: str
    plant: Callable[[], None]
    works: Sequence[str] = ()
    """Beginnings of the names of works that can show it; none: all."""
    tries: int = 40

    def fits(self, work: str) -> bool:
        """Whether this work can show it."""
        return not self.works or work.startswith(tuple(self.works))


FAULTS: Sequence[Fault] = ()
