"""ottava trains transformers in FP8 and shows exactly where FP8 hurts.

    report = ottava.convert(model, "tensorwise")      # nn.Linear -> FP8, in place, same Parameters
    ...train as before...
    print(ottava.receipt(model))                      # what every GEMM really ran
    with ottava.watch(model):                         # what every cast did to its tensor, on record
        ...train...

Start with README.md; `docs/design.md` says why things are as they are.
"""

from importlib.metadata import version

from ottava import debug, nn
from ottava.autocast import autocast
from ottava.casts import quantize
from ottava.debug.watch import watch
from ottava.formats import E2M1, E4M3, E5M2, E8M0
from ottava.nn import assert_fp8, calibrate, convert, graphed_step, receipt
from ottava.ops import gemm
from ottava.quantized_tensor import QuantizationSpec, QuantizedTensor
from ottava.recipe import RECIPES, GemmRecipe, Recipe, get_recipe
from ottava.scaling import Granularity
from ottava.state import ScalingState

__version__ = version("ottava")

__all__ = [
    "E2M1",
    "E4M3",
    "E5M2",
    "E8M0",
    "RECIPES",
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
    "gemm",
    "get_recipe",
    "graphed_step",
    "nn",
    "quantize",
    "receipt",
    "watch",
]
