"""Which layers gain from FP8, predicted: a roofline per GEMM, and the casts it needs.

    GEMM   max(2 M N K / (rate * wave efficiency), bytes / bandwidth) + start
    cast   bytes moved / transposing bandwidth + launches         of x, of w and of dy, each for its two GEMMs

The plan refuses a layer that is slower than BF16 in sum, with the reason. It predicts GPU time: in eager mode the host
needs some 150 us a layer, which only a graph or torch.compile hides. The default constants describe an H200, from data
sheets and published measurements; `ottava bench ceilings` measures yours (`Device.read`). `tune` measures the GEMMs of
a model on this device: from then on each runs its fastest kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ottava.base.errors import need
from ottava.base.untrusted import UntrustedError, misfit, parse_json, read_text
from ottava.engine.functional import quantized_layers
from ottava.kernels.gemm_choice import Choice, Store, Timer, call_name
from ottava.numerics.scaling import BLOCK_1X128, BLOCK_128X128, PER_ROW, PER_TENSOR
from ottava.numerics.tensor import QuantizationSpec
from ottava.ops.gemm import tune_gemm
from ottava.ops.quantize import quantize
from ottava.recipe import GEMMS, GemmRecipe, Recipe

TOKENS = 16384
"""Default number of tokens of one forward, batch x sequence on one GPU."""


@dataclass(frozen=True)
class Device:
    """A GPU as a roofline sees it; SI units."""

    name: str = "H200 (assumed)"
    """Printed with every prediction."""
    capability: tuple[int, int] = (9, 0)
    """Compute capability: which GEMMs stay in FP8."""
    bf16: float = 750e12
    """Operations a second of a large BF16 GEMM on random numbers: 769 to 798e12 at 8192 cubed on an H200, less 5%."""
    tensor_fast: float = 1.85
    """FP8 over BF16, one scale a tensor, short accumulator. cuBLAS on H200 NVL: 1.90 (TransformerEngine's docs)."""
    tensor: float = 1.65
    """The same with full accumulation: fast is 1.1 to 1.2 times as fast (torchao #2377)."""
    row: float = 1.75
    """Scales of rows and columns. FBGEMM on H100: 1.80 (FBGEMM #2766)."""
    block: float = 1.6
    """1x128 with 128x128. cuBLAS on H100: 1.66 (torchao #2784)."""
    bandwidth: float = 4.0e12
    """Bytes a second of a copy."""
    transposing: float = 3.6e12
    """Of a cast that also writes its transpose: TransformerEngine's reach 3.4 to 3.5e12."""
    launch: float = 2e-6
    """Seconds of the shortest kernel."""
    start: float = 4e-6
    """Seconds that a GEMM takes beside its work."""
    processors: int = 132
    """Streaming multiprocessors."""

    @classmethod
    def read(cls, path: Path) -> Device:
        """The constants that `ottava bench ceilings` measured.

        Raises:
            ValueError: no such measurement in the file, or a constant with a name that is not known.
        """
        try:
            found = parse_json(read_text(Path(path)))
        except UntrustedError as error:
            raise ValueError(f"{path}: {error}; write one with `ottava bench ceilings`") from error
        constants = found.get("constants") if isinstance(found, dict) else None
        known = {field.name for field in fields(cls)}
        if not isinstance(constants, dict) or not constants or not set(constants) <= known:
            raise ValueError(
                f"{path}: needs an object 'constants' with some of {', '.join(sorted(known))}; write one with "
                "`ottava bench ceilings`"
            )
        if empty := [name for name, value in constants.items() if value is None]:
            raise ValueError(f"{path}: constants.{empty[0]} is null; needs a number, or leave it out")
        if wrong := misfit(constants, {"name": str, "capability": [int], "*": float}, "constants"):
            raise ValueError(f"{path}: {wrong}")
        if "capability" in constants:
            constants["capability"] = tuple(constants["capability"])
        return cls(**constants)

    def gemm(self, m: int, n: int, k: int, rate: float, itemsize: int) -> float:
        """Seconds of (M, K) x (N, K) -> (M, N) in 16 bits, operands of `itemsize` bytes."""
        tiles = math.ceil(m / 128) * math.ceil(n / 256)
        efficiency = tiles / (math.ceil(tiles / self.processors) * self.processors)
        if efficiency < 0.6:  # smaller tiles fill a wave better, and a long K is split among processors
            smaller = math.ceil(m / 128) * math.ceil(n / 128) * max(1, k // 2048) / self.processors
            efficiency = max(efficiency, min(1.0, smaller))
        moved = (m * k + n * k) * itemsize + 2 * m * n
        return max(2 * m * n * k / (rate * efficiency), moved / self.bandwidth) + self.start


@dataclass(frozen=True)
class GemmTime:
    """One GEMM, predicted."""

    kernel: str
    """The kind of GEMM: "bf16", "fp8 tensor", "fp8 row", "fp8 blocks" or "emulated"."""
    bf16: float
    """Seconds in BF16."""
    planned: float
    """Seconds under the recipe, without its casts."""


@dataclass(frozen=True)
class LayerPlan:
    """One linear layer, predicted."""

    name: str
    """In the model."""
    shape: tuple[int, int, int]
    """(M, K, N): tokens, input features, output features."""
    gemms: Mapping[str, GemmTime]
    """fprop, dgrad, wgrad."""
    casts: float
    """Seconds of all casts, forward and backward."""
    reason: str
    """Why it gains or not."""

    @property
    def bf16(self) -> float:
        """Seconds of the three GEMMs in BF16."""
        return sum(gemm.bf16 for gemm in self.gemms.values())

    @property
    def planned(self) -> float:
        """Seconds of the three GEMMs and the casts under the recipe."""
        return sum(gemm.planned for gemm in self.gemms.values()) + self.casts

    @property
    def speedup(self) -> float:
        """BF16 over recipe; above 1 the recipe gains."""
        return self.bf16 / self.planned

    @property
    def taken(self) -> bool:
        """Whether the recipe gains here."""
        return self.speedup > 1.0


@dataclass(frozen=True)
class Plan:
    """The prediction for a model: the gain of each layer, and the layers that should stay in BF16."""

    recipe: Recipe
    """The requested recipe."""
    tokens: int
    """Rows of each GEMM's activations."""
    device: Device
    """The constants used."""
    layers: tuple[LayerPlan, ...]
    """In the order of the model."""

    @property
    def speedup(self) -> float:
        """Of all linear layers together, the refused ones in BF16."""
        planned = sum(min(layer.planned, layer.bf16) for layer in self.layers)
        return sum(layer.bf16 for layer in self.layers) / planned if planned else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, seconds."""
        layers = [
            {
                "name": layer.name,
                "shape": list(layer.shape),
                "gemms": {name: asdict(gemm) for name, gemm in layer.gemms.items()},
                "casts": layer.casts,
                "speedup": layer.speedup,
                "taken": layer.taken,
                "reason": layer.reason,
            }
            for layer in self.layers
        ]
        own = {"recipe": self.recipe.name, "tokens": self.tokens, "speedup": self.speedup}
        return {**own, "device": asdict(self.device), "layers": layers}

    def __str__(self) -> str:
        taken = sum(layer.taken for layer in self.layers)
        lines = [
            f"recipe {self.recipe.name!r}, {self.tokens:,} tokens, {self.device.name}: predicted, not measured",
            f"{taken} of {len(self.layers)} linear layers gain; all of them together {self.speedup:.2f} x BF16",
        ]
        width = max((len(layer.name) for layer in self.layers), default=0)
        for layer in self.layers:
            each = " ".join(f"{name} {gemm.bf16 / gemm.planned:.2f}" for name, gemm in layer.gemms.items())
            m, k, n = layer.shape
            lines.append(f"  {layer.name:{width}} {m}x{k}x{n}  {layer.speedup:.2f}  ({each})  {layer.reason}")
        return "\n".join(lines)


def plan_layer(
    name: str,
    shape: tuple[int, int, int],
    recipe: Recipe,
    device: Device,
    *,
    stored: QuantizationSpec | None = None,
) -> LayerPlan:
    """Predicts one layer of (M, K, N).

    Args:
        stored: the spec of a weight stored in FP8: W needs no cast then, and W.T only if it has its own scales.
    Raises:
        ValueError: a size below 1.

    Example:
        >>> from ottava.recipe import get_recipe
        >>> plan_layer("up", (16384, 4096, 14336), get_recipe("delayed"), Device()).taken
        True
        >>> print(plan_layer("tiny", (512, 512, 512), get_recipe("rowwise"), Device()).reason)
        stays in BF16: casts take 19 us and the GEMMs save 4 us
    """
    m, k, n = shape
    if min(shape) < 1:
        raise ValueError(f"plan: layer {name!r} has M, K, N = {shape}; each needs at least 1")
    resolved = recipe.for_layer(name)
    sizes = {"fprop": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}
    gemms = {gemm: _gemm(sizes[gemm], getattr(resolved, gemm), device) for gemm in GEMMS}
    elements = {"input": m * k, "weight": n * k, "grad_output": m * n}
    cells = {tensor: resolved.cells(tensor) for tensor in elements}
    if stored is not None:
        cells["weight"] = None, None if stored.granularity.transposes else cells["weight"][1]
    casts = sum(_cast(count, *cells[tensor], device) for tensor, count in elements.items())
    layer = LayerPlan(name, shape, gemms, casts, "")
    saved = layer.bf16 - layer.planned + casts
    emulated = [gemm for gemm, one in gemms.items() if one.kernel == "emulated"]
    if not resolved.quantized:
        reason = "BF16 by the recipe"
    elif emulated and not layer.taken:
        capability = "".join(map(str, device.capability))
        reason = f"stays in BF16: sm_{capability} emulates {', '.join(emulated)} of this recipe"
    elif not layer.taken:
        reason = f"stays in BF16: casts take {1e6 * casts:.0f} us and the GEMMs save {1e6 * max(saved, 0):.0f} us"
    else:
        reason = f"gains: the GEMMs save {1e6 * saved:.0f} us and casts take {1e6 * casts:.0f} us"
    return LayerPlan(name, shape, gemms, casts, reason)


def _gemm(sizes: tuple[int, int, int], cells: GemmRecipe, device: Device) -> GemmTime:
    bf16 = device.gemm(*sizes, device.bf16, 2)
    kernel, ratio = _kernel(cells, device)
    if kernel == "bf16":
        return GemmTime(kernel, bf16, bf16)
    if kernel == "emulated":  # decoded to BF16 first: 1 byte read and 2 written an element
        m, n, k = sizes
        return GemmTime(kernel, bf16, bf16 + 3 * (m * k + n * k) / device.bandwidth + 2 * device.launch)
    return GemmTime(kernel, bf16, device.gemm(*sizes, device.bf16 * ratio, 1))


def _kernel(cells: GemmRecipe, device: Device) -> tuple[str, float]:
    """(the kind of GEMM, its rate over BF16's)."""
    if cells.lhs is None or cells.rhs is None:
        return "bf16", 1.0
    if (
        cells.compute == "bf16"
        or cells.accumulator
        or max(cells.lhs.format.bits, cells.rhs.format.bits) != 8
        or device.capability < (8, 9)
    ):
        return "emulated", 1.0
    sides = {cells.lhs.granularity, cells.rhs.granularity}
    if sides == {PER_TENSOR}:
        return "fp8 tensor", device.tensor_fast if cells.fast_accum else device.tensor
    if sides <= {PER_TENSOR, PER_ROW} and device.capability >= (9, 0):
        return "fp8 row", device.row
    if sides <= {BLOCK_1X128, BLOCK_128X128} and device.capability[0] == 9:
        return "fp8 blocks", device.block
    return "emulated", 1.0


def _cast(elements: int, row: QuantizationSpec | None, col: QuantizationSpec | None, device: Device) -> float:
    """Seconds to cast a bf16 tensor for its two GEMMs; as `kernels.triton.quantize` does it."""
    wanted = [spec for spec in (row, col) if spec is not None]
    if not wanted:
        return 0.0
    seconds = len(wanted) * elements / device.transposing  # a byte written each
    whole = [not spec.predicted and None in (spec.granularity.rows, spec.granularity.cols) for spec in wanted]
    reads = 2 if any(whole) else 1
    launches = 1 if not any(whole) and not wanted[0].predicted else 3  # zeroed amax, and two kernels
    return seconds + reads * 2 * elements / device.transposing + launches * device.launch


def tune(model: nn.Module, *, timer: Timer | None = None, store: Store | None = None) -> dict[str, Choice]:
    """Times every way to run each quantized GEMM of the model's last forward and backward; results are kept on disk.

    Args:
        model: converted, and run once, forward and backward, at the sizes it will train with.
        timer, store: as for `ops.gemm.tune_gemm`.
    Returns:
        call -> its measurement; each distinct call once. str() of a measurement is one line.
    Raises:
        ValueError: no layer has run a quantized GEMM; or the model is not on a CUDA device, and there is no timer.
    Edge cases: it does not see calls inside torch.compile; run the model once without it. Operands are random numbers
    of
        the same formats and sizes. It takes the time of some hundred GEMMs a call and waits for the device.

    Example:
        >>> import ottava
        >>> model = nn.Sequential(nn.Linear(64, 32)).bfloat16()
        >>> report = ottava.convert(model, "tensorwise")
        >>> model(torch.ones(4, 64, dtype=torch.bfloat16)).sum().backward()
        >>> ottava.nn.tune(model)                                                    # on a GPU it would measure
        Traceback (most recent call last):
        ValueError: tune_gemm: got operands on cpu; times are taken on cuda: move them there
    """
    need("tune", model, nn.Module)
    found: dict[str, Choice] = {}
    for layer in quantized_layers(model):
        if layer.last_call is None:
            continue
        call = layer.last_call.last_training or layer.last_call
        for gemm, record in call.records.items():
            cells = getattr(call.recipe, gemm)
            if not cells.quantized or cells.compute != "native" or cells.accumulator is not None:
                continue
            device, dtype = layer.weight.device, getattr(torch, record.out_dtype)
            # from a separate generator: tuning does not change a run's random numbers
            numbers = partial(torch.randn, device=device, generator=torch.Generator(device).manual_seed(0))
            a, b = (
                quantize(numbers(rows, record.k, dtype=torch.bfloat16), spec)
                for rows, spec in ((record.m, cells.lhs), (record.n, cells.rhs))
            )
            bias = numbers(record.n, dtype=dtype) if gemm == "fprop" and layer.bias is not None else None
            name = call_name(a, b, dtype, bias, cells.fast_accum)
            if name not in found:
                found[name] = tune_gemm(
                    a, b, out_dtype=dtype, bias=bias, fast_accum=cells.fast_accum, timer=timer, store=store
                )
    if not found:
        raise ValueError(
            "tune: no layer has run a quantized GEMM; convert the model and run a forward and a backward first, "
            "without torch.compile"
        )
    return found
