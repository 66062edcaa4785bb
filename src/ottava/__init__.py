"""ottava trains transformers in FP8 and shows exactly where FP8 hurts.

    report = ottava.convert(model, "tensorwise")      # nn.Linear -> FP8, in place, same Parameters
    ...train as before...
    print(ottava.receipt(model))                      # what every GEMM really ran
    with ottava.watch(model):                         # what every cast did to its tensor, on record
        ...train...

Start with README.md; `docs/design.md` says why things are as they are.
"""

from importlib.metadata import version
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ottava.first_use import first_use

if TYPE_CHECKING:  # for type checkers what _HOMES is for Python
    from ottava import debug, distributed, nn, optim
    from ottava.accumulator import Accumulator
    from ottava.ambient import autocast
    from ottava.casts import quantize
    from ottava.debug.watch import watch
    from ottava.footprint import memory
    from ottava.formats import E2M1, E4M3, E5M2, E8M0
    from ottava.gemm_recipe import GemmRecipe
    from ottava.nn import assert_fp8, calibrate, convert, graphed_step, load_fp8, model_init, receipt
    from ottava.ops import gemm
    from ottava.quantized_tensor import QuantizationSpec, QuantizedTensor
    from ottava.recipe import RECIPES, Recipe, get_recipe
    from ottava.scaling import Granularity
    from ottava.serving.export import export
    from ottava.state import ScalingState

__version__ = version("ottava")

_HOMES = MappingProxyType(
    {
        "ottava.accumulator": ("Accumulator",),
        "ottava.ambient": ("autocast",),
        "ottava.casts": ("quantize",),
        "ottava.debug.watch": ("watch",),
        "ottava.footprint": ("memory",),
        "ottava.formats": ("E2M1", "E4M3", "E5M2", "E8M0"),
        "ottava.nn": ("assert_fp8", "calibrate", "convert", "graphed_step", "load_fp8", "model_init", "receipt"),
        "ottava.ops": ("gemm",),
        "ottava.quantized_tensor": ("QuantizationSpec", "QuantizedTensor"),
        "ottava.gemm_recipe": ("GemmRecipe",),
        "ottava.recipe": ("RECIPES", "Recipe", "get_recipe"),
        "ottava.scaling": ("Granularity",),
        "ottava.serving.export": ("export",),
        "ottava.state": ("ScalingState",),
    }
)

__all__ = [
    "E2M1",
    "E4M3",
    "E5M2",
    "E8M0",
    "RECIPES",
    "Accumulator",
    "GemmRecipe",
    "Granularity",
    "QuantizationSpec",
    "QuantizedTensor",
    "Recipe",
    "ScalingState",
    "assert_fp8",
    "autocast",
    "calibrate",
    "convert",
    "debug",
    "distributed",
    "export",
    "gemm",
    "get_recipe",
    "graphed_step",
    "load_fp8",
    "memory",
    "model_init",
    "nn",
    "optim",
    "quantize",
    "receipt",
    "watch",
]


def __getattr__(name: str) -> Any:
    return first_use(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
