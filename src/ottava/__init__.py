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
    from ottava import debug as debug
    from ottava import distributed as distributed
    from ottava import nn as nn
    from ottava import optim as optim
    from ottava.engine.autocast import autocast as autocast
    from ottava.engine.state import ScalingState as ScalingState
    from ottava.nn import assert_fp8 as assert_fp8
    from ottava.nn import calibrate as calibrate
    from ottava.nn import convert as convert
    from ottava.nn import graphed_step as graphed_step
    from ottava.nn import load_fp8 as load_fp8
    from ottava.nn import model_init as model_init
    from ottava.nn import receipt as receipt
    from ottava.numerics.accumulator import Accumulator as Accumulator
    from ottava.numerics.formats import E2M1 as E2M1
    from ottava.numerics.formats import E4M3 as E4M3
    from ottava.numerics.formats import E5M2 as E5M2
    from ottava.numerics.formats import E8M0 as E8M0
    from ottava.numerics.scaling import Granularity as Granularity
    from ottava.numerics.tensor import QuantizationSpec as QuantizationSpec
    from ottava.numerics.tensor import QuantizedTensor as QuantizedTensor
    from ottava.ops.gemm import gemm as gemm
    from ottava.ops.quantize import quantize as quantize
    from ottava.plan.memory import memory as memory
    from ottava.recipe import RECIPES as RECIPES
    from ottava.recipe import GemmRecipe as GemmRecipe
    from ottava.recipe import Recipe as Recipe
    from ottava.recipe import get_recipe as get_recipe
    from ottava.serving.export import export as export
    from ottava.watching.session import watch as watch

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

__all__ = sorted(["debug", "distributed", "nn", "optim", *(name for names in _HOMES.values() for name in names)])


def __getattr__(name: str) -> Any:
    return first_use(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
