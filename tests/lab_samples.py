"""Studies made of known numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ottava.lab.page import LabResult
from ottava.lab.study import DISTRIBUTIONS, LabSettings, Measurement
from ottava.measure.tally import PARTS
from ottava.recipe import GEMMS, RECIPES


def casts(seed: int, systematic: float = 1.0, *, cast: bool = True) -> dict[str, Any]:
    """Measurements of a layer that differ by seed."""
    gemm = {"error": 0.03 + 1e-4 * seed, "systematic": systematic + 1e-3 * seed, "shrink": 1e-3}
    shares = dict(zip(PARTS, (10.0, 0.0, -5.0, 95.0), strict=True))
    operands = {name: {"sqnr_db": 25.0 + seed, **shares} for name in ("X", "W", "dY", "dY.T")} if cast else {}
    return {name: {"casts": operands, "gemms": dict.fromkeys(GEMMS, gemm)} for name in DISTRIBUTIONS}


def study(differences: dict[str, Sequence[float]], seeds: int = 4, systematic: float = 1.0) -> LabResult:
    """A study whose recipes end that far from BF16."""
    made = {}
    for name, deltas in {"bf16": [0.0] * seeds, **differences}.items():
        for seed, delta in enumerate(deltas):
            one = Measurement(
                recipe=name,
                seed=seed,
                casts=casts(seed, systematic, cast=name != "bf16"),
                losses=[5.0, 4.0 + 0.1 * seed + delta],
                validation=2.0 + 0.1 * seed + delta,
                seconds_per_step=0.1 if name == "bf16" else 0.15,
            )
            made[name, seed] = one
    settings = LabSettings(recipes=tuple(RECIPES[name] for name in differences), seeds=seeds, steps=2)
    return LabResult(settings, made, "ottava lab")
