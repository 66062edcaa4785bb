"""ottava trains transformers in FP8 and shows exactly where FP8 hurts.

    report = ottava.convert(model, "tensorwise")      # nn.Linear -> FP8, in place, same Parameters
    ...train as before...
    print(ottava.receipt(model))                      # what every GEMM really ran
    with ottava.watch(model):                         # what every cast did to its tensor, on record
        ...train...

Start with README.md; `docs/design.md` says why things are as they are.
"""

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ottava.base import __version__ as __version__  # public
from ottava.base import first_use

if TYPE_CHECKING:  # for type checkers what _HOMES is for Python
    from ottava import debug, distributed, nn, optim
    from ottava.engine.autocast import autocast
    from ottava.engine.state import ScalingState
    from ottava.nn import assert_fp8, calibrate, convert, graphed_step, load_fp8, model_init, receipt
    from ottava.numerics.accumulator import Accumulator
    from ottava.numerics.formats import E2M1, E4M3, E5M2, E8M0
    from ottava.numerics.scaling import Granularity
    from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
    from ottava.ops.gemm import gemm
    from ottava.ops.quantize import quantize
    from ottava.plan.memory import memory
    from ottava.recipe import RECIPES, GemmRecipe, Recipe, get_recipe
    from ottava.serving.export import export
    from ottava.watching.session import watch


_HOMES = MappingProxyType(
    {
        "ottava.engine.autocast": ("autocast",),
        "ottava.engine.state": ("ScalingState",),
        "ottava.nn": ("assert_fp8", "calibrate", "convert", "graphed_step", "load_fp8", "model_init", "receipt"),
        "ottava.numerics.accumulator": ("Accumulator",),
        "ottava.numerics.formats": ("E2M1", "E4M3", "E5M2", "E8M0"),
        "ottava.numerics.scaling": ("Granularity",),
        "ottava.numerics.tensor": ("QuantizationSpec", "QuantizedTensor"),
        "ottava.ops.gemm": ("gemm",),
        "ottava.ops.quantize": ("quantize",),
        "ottava.plan.memory": ("memory",),
        "ottava.recipe": ("RECIPES", "GemmRecipe", "Recipe", "get_recipe"),
        "ottava.serving.export": ("export",),
        "ottava.watching.session": ("watch",),
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
