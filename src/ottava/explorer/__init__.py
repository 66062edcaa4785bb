"""A page that computes with the engine's rules in the browser: casts, GEMMs, a training. It needs no network.

Formats, recipes and constants of scale rules stand only in `numerics` and `recipe`; `tables` hands them to engine.js.
"""

from dataclasses import asdict
from typing import Any

import torch

from ottava.numerics.formats import FORMATS, Format
from ottava.numerics.scaling import FOUR_OVER_SIX_TOPS, MS_EDEN_TOPS, TE_FOUR_OVER_SIX
from ottava.numerics.tensor import QuantizationSpec
from ottava.numerics.transforms import Hadamard
from ottava.recipe import GEMMS, RECIPES, Recipe
from ottava.report.frame import render, script_json

_DERIVED = ("bits", "emin", "emax", "max", "lowest", "min_normal", "min_subnormal", "eps", "has_nan")
_CHOICES = ("scale_format", "scaling", "margin", "amax_history_len", "amax_compute_algo", "guard_bits", "rounding")


def explorer_page() -> str:
    """The whole page, HTML.

    Example:
        >>> explorer_page()[:15]
        '<!doctype html>'
    """
    return render(__package__, "explorer.html.j2", tables=script_json(tables()))


def tables() -> dict[str, Any]:
    """What engine.js knows of formats, recipes and scale rules: plain JSON values, exact as FP64.

    Example:
        >>> tables()["recipes"]["mxfp8"]["fprop"]["lhs"]["scale_format"], tables()["formats"]["E4M3"]["max"]
        ('e8m0', 448.0)
    """
    chosen = {"four_over_six": FOUR_OVER_SIX_TOPS, "ms_eden": MS_EDEN_TOPS}
    rules = {name: {"tensor": tensor, "tops": tops} for name, (tensor, tops) in chosen.items()}
    signs = Hadamard().diagonal(None, torch.device("cpu")).tolist()
    return {
        "formats": {name: _format(fmt) for name, fmt in FORMATS.items()},
        "recipes": {name: _recipe(recipe) for name, recipe in RECIPES.items()},
        "rules": {**rules, "te_four_over_six": dict(TE_FOUR_OVER_SIX), "nvidia_signs": signs},
    }


def cell(spec: QuantizationSpec | None) -> dict[str, Any] | None:
    """One cell of a recipe as engine.js reads it.

    Example:
        >>> cell(RECIPES["nvfp4"].fprop.rhs)["name"]
        'E2M1[16x16, e4m3]'
    """
    if spec is None:
        return None
    transform = None if spec.transform is None else {"kind": spec.transform.kind, **asdict(spec.transform)}
    blocks = {"rows": spec.granularity.rows, "cols": spec.granularity.cols}
    choices = {name: getattr(spec, name) for name in (*_CHOICES, "block_scale")}
    return {"format": spec.format.name, **blocks, **choices, "transform": transform, "name": str(spec)}


def _format(fmt: Format) -> dict[str, Any]:
    stored = {name: value for name, value in asdict(fmt).items() if name != "dtype"}
    return stored | {name: getattr(fmt, name) for name in _DERIVED}


def _recipe(recipe: Recipe) -> dict[str, Any]:
    gemms = {gemm: getattr(recipe, gemm) for gemm in GEMMS}
    return {name: {"lhs": cell(gemm.lhs), "rhs": cell(gemm.rhs)} for name, gemm in gemms.items()}
