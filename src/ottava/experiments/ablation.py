"""Finds the smallest set of casts that makes the error of a shadow step, by turning casts off and looking.

    1  the casts of one GEMM off, in all layers          -> is one of fprop, dgrad, wgrad enough?
    2  half of what is left off, again and again         -> the smallest set whose absence halves the error
    3  of each member one operand exact                  -> the operand

Errors of independent casts add as squares, so a set that halves the error makes three quarters of its square.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from ottava.engine.layer import QuantizedLayer
from ottava.experiments.casts import Casts, is_torchao, only_without
from ottava.experiments.passes import Gradients, Player, Way
from ottava.experiments.replay import door_hooks, one_operand
from ottava.experiments.shadow import compared
from ottava.recipe import GEMMS, TENSOR_OF

Unit = tuple[str, str]
"""A layer and a GEMM; "" for all GEMMs of a layer of another package."""
_TRIALS, _SECONDS = 40, 20.0
_OPERANDS = 4
"""Sets up to this size are taken apart into operands."""


class Ablation:
    """A search among the casts of one program.

    Args:
        player: runs the program.
        casts: its casts, real ones.
        exact: the gradients without casts.
        error: the error with all of them.
        tail: as the shadow's.
    """

    def __init__(self, player: Player, casts: Casts, exact: Gradients, error: float, *, tail: bool) -> None:
        self.player, self.casts, self.exact, self.error, self.tail = player, casts, exact, error, tail
        self.trials = 0
        self._began = time.perf_counter()
        self._known: dict[tuple[frozenset[Unit], str], float] = {}

    def facts(self) -> dict[str, Any] | None:
        """Searches; the facts of its line in experiments.jsonl. None: nothing can be switched alone."""
        units = self._units()
        if len(units) < 2:
            return None
        kept = self._least(self._of_one_gemm(units), ())
        after = self._error(kept)
        parts = [self._operand(unit, kept) if len(kept) <= _OPERANDS else "" for unit in kept]
        return {
            "set": [{"layer": n, "gemm": g, "operand": o} for (n, g), o in zip(kept, parts, strict=True)],
            "of": len(units),
            "complete": not self._spent,
            "error_before": self.error,
            "error_after": after if math.isfinite(after) else None,
            "trials": self.trials,
            "seconds": time.perf_counter() - self._began,
        }

    def _units(self) -> list[Unit]:
        units: list[Unit] = []
        for name, layer in self.casts.layers.items():
            if name in self.casts.recipes:
                units += [(name, gemm) for gemm in GEMMS if getattr(self.casts.recipes[name], gemm).quantized]
            elif is_torchao(layer):
                units.append((name, ""))
        return units

    def _of_one_gemm(self, units: Sequence[Unit]) -> list[Unit]:
        """The units of the GEMM whose absence is enough; all units if none is."""
        groups = {gemm: [unit for unit in units if unit[1] == gemm] for gemm in GEMMS}
        errors = {gemm: self._error(group) for gemm, group in groups.items() if group}
        best = min(errors, key=errors.__getitem__, default="")
        return groups[best] if errors and errors[best] < self.error / 2 else list(units)

    def _least(self, units: Sequence[Unit], off: Sequence[Unit]) -> list[Unit]:
        """A smallest part of these units that is enough together with those that are off."""
        if len(units) == 1 or self._spent:
            return list(units)
        one, other = units[: len(units) // 2], units[len(units) // 2 :]
        for half in (one, other):
            if self._error([*off, *half]) < self.error / 2:
                return self._least(half, off)
        first = self._least(one, [*off, *other])
        return [*first, *self._least(other, [*off, *first])]

    def _operand(self, unit: Unit, kept: Sequence[Unit]) -> str:
        """The operand whose exactness is enough, if all other members are off."""
        layer = self.casts.layers[unit[0]]
        if not isinstance(layer, QuantizedLayer):
            return ""
        others = [other for other in kept if other != unit]
        errors = {}
        for side, left in (("lhs", "rhs"), ("rhs", "lhs")):
            exact, quantized = TENSOR_OF[unit[1], side][0], TENSOR_OF[unit[1], left][0]
            errors[exact] = self._error(others, layer=layer, gemm=unit[1], quantized=quantized)
        best = min(errors, key=errors.__getitem__)
        return best if errors[best] < self.error / 2 else "both"

    @property
    def _spent(self) -> bool:
        return self.trials >= _TRIALS or time.perf_counter() - self._began > _SECONDS

    def _error(
        self, off: Sequence[Unit], *, layer: QuantizedLayer | None = None, gemm: str = "", quantized: str = ""
    ) -> float:
        """The error with these casts off; and with one GEMM of one layer in which only one operand is quantized."""
        key = frozenset(off), f"{layer.name if layer else ''} {gemm} {quantized}"
        if key in self._known:
            return self._known[key]
        if self._spent:
            return math.inf
        self.trials += 1
        way = only_without(self.casts, set(off))

        @contextmanager
        def switched() -> Any:
            with ExitStack() as stack:
                stack.enter_context(way.switched())
                if layer is not None:
                    stack.enter_context(door_hooks(layer, one_operand(gemm, quantized)))
                yield

        found = self.player.run(Way(way.ambient, switched), tail=self.tail).gradients
        error = compared(found, self.exact, None, self.player.parameters, _unnamed)["error"]
        self._known[key] = math.inf if error is None else error
        return self._known[key]


def _unnamed(parameter: Tensor) -> str:
    return ""
