"""TransformerEngine's statistics log, and the questions of its debug tool, for scripts that read its file or buffers.

A configuration names layers, tensors, statistics and steps. What a layer casts then, or a script gives to
`inspect_tensor`, is summed until the step ends; several micro-batches make one number. Each rank writes its own file,
of its own numbers: `ottava import` reads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ottava.compat.transformer_engine.pytorch.quantization import debug_tool
from ottava.compat.transformer_engine.pytorch.tensors import QuantizedTensor
from ottava.interop.te_config import RECIPES_OF_TE, TENSORS, entries_of, layer_patterns
from ottava.measure.layer_names import matches
from ottava.numerics.tensor import QuantizedTensor as Codes
from ottava.ops.quantize import quantize
from ottava.recipe import get_recipe
from ottava.weights.parameter import QuantizedWeight

FILE = "nvdlfw_inspect_statistics_logs/nvdlfw_inspect_globalrank-{}.log"
"""Below log_dir."""

_JOIN: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    dict.fromkeys(("n", "sum", "abs", "squares", "lost", "errors", "over"), torch.add)
    | dict.fromkeys(("min", "least", "scale_min"), torch.minimum)
    | dict.fromkeys(("max", "amax", "scale_max", "range"), torch.maximum)
)
"""Sum -> how those of two tensors become that of both."""

_OF_TENSOR: Mapping[str, Callable[[Mapping[str, Tensor]], Tensor]] = MappingProxyType(
    {
        "min": lambda s: s["min"],
        "max": lambda s: s["max"],
        "sum": lambda s: s["sum"],
        "numel": lambda s: s["n"],
        "mean": lambda s: s["sum"] / s["n"],
        "variance": lambda s: (s["squares"] - s["sum"] ** 2 / s["n"]).clamp(min=0) / (s["n"] - 1).clamp(min=1),
        "std": lambda s: _OF_TENSOR["variance"](s).sqrt(),
        "l1_norm": lambda s: s["abs"],
        "l2_norm": lambda s: s["squares"].sqrt(),
        "cur_amax": lambda s: s["amax"],
        "dynamic_range": lambda s: torch.where(s["amax"] > 0, s["amax"].log2() - s["least"].log2(), 0.0),
    }
)
_OF_CAST: Mapping[str, Callable[[Mapping[str, Tensor]], Tensor]] = MappingProxyType(
    {
        "underflows_num": lambda s: s["lost"],
        "underflows%": lambda s: 100 * s["lost"] / s["n"],
        "overflows_num": lambda s: s["over"],
        "overflows%": lambda s: 100 * s["over"] / s["n"],
        "mse": lambda s: s["errors"] / s["n"],
        "scale_inv_min": lambda s: s["scale_min"],
        "scale_inv_max": lambda s: s["scale_max"],
    }
)


def _sums(x: Tensor) -> dict[str, Tensor]:
    wide = x.double()
    size = wide.abs()
    made = {"n": torch.tensor(float(x.numel())), "sum": wide.sum(), "abs": size.sum(), "squares": wide.square().sum()}
    made |= {"min": wide.min(), "max": wide.max(), "amax": size.max()}
    return made | {"least": size.masked_fill(size == 0, torch.inf).min()}


def _cast_sums(x: Tensor, codes: Codes) -> dict[str, Tensor]:
    """Of a matrix, or of its transpose, and its codes."""
    wide, numbers = codes.transformed(x).float(), codes.dequantize(torch.float32)
    edge = codes.spec.granularity.multiply_(torch.full_like(wide, codes.spec.format.max), codes.scale_inv)
    made = {"n": torch.tensor(float(x.numel())), "lost": ((wide != 0) & (numbers == 0)).sum().double()}
    made |= {"errors": (numbers - wide).double().square().sum(), "over": (wide.abs() > edge).sum().double()}
    return made | {"scale_min": codes.scale_inv.min().double(), "scale_max": codes.scale_inv.max().double()}


class BlockwiseDynamicRangeStat(NamedTuple):
    """Which blocks `compute_max_blockwise_dynamic_range` looks at."""

    block_size: int = 32
    dims: int = 1
    """1: block_size numbers of a row; 2: squares."""
    max_over_orientations: bool = True
    """Of columns, too."""

    def __str__(self) -> str:
        over = "_max_over_orientations" if self.max_over_orientations else ""
        return f"max_blockwise_dynamic_range_block_size_{self.block_size}_dims_{self.dims}{over}"


def compute_max_blockwise_dynamic_range(tensor: Tensor, stat_config: BlockwiseDynamicRangeStat) -> Tensor:
    """The most octaves between the largest and the smallest number beside 0 of a block; blocks of zeros have 0.

    Raises:
        ValueError: blocks do not divide the tensor.

    Example:
        >>> pairs = BlockwiseDynamicRangeStat(2, 1, False)
        >>> compute_max_blockwise_dynamic_range(torch.tensor([[1.0, 8.0, 2.0, 2.0]]), pairs)
        tensor(3.)
    """
    size, matrix = stat_config.block_size, tensor.detach().reshape(-1, tensor.shape[-1]).abs().float()
    rows = size if stat_config.dims == 2 else 1
    if matrix.shape[0] % rows or matrix.shape[1] % size:
        raise ValueError(f"{stat_config}: blocks of {rows}x{size} do not divide {tuple(matrix.shape)}")

    def most(x: Tensor) -> Tensor:
        blocks = x.reshape(x.shape[0] // rows, rows, x.shape[1] // size, size).transpose(1, 2).flatten(2)
        top = blocks.amax(-1)
        return torch.where(top > 0, top.log2() - blocks.masked_fill(blocks == 0, torch.inf).amin(-1).log2(), 0.0).max()

    found = most(matrix)
    return torch.maximum(found, most(matrix.t())) if stat_config.max_over_orientations and rows == 1 else found


class Statistics:
    """The sums of a step, and the file that it is written to.

    Args:
        logs: of `te_config.read_logs`.  folder: log_dir.  step: the first iteration.
    """

    def __init__(self, logs: list[dict[str, Any]], folder: Path, step: int = 0) -> None:
        self.logs = logs
        self.path = folder / FILE.format(dist.get_rank() if dist.is_initialized() else 0)
        self.step = step
        self.kept: dict[tuple[str, str, int], dict[Any, dict[str, Tensor]]] = {}
        self.wanted: dict[tuple[str, str, int], dict[str, tuple[Any, str]]] = {}
        """(layer, tensor, iteration) -> name of a statistic -> the sums that it is made of, and its formula."""

    def due(self, layer: str, tensor: str, iteration: int) -> list[dict[str, Any]]:
        """The entries of the configuration for a tensor, by TransformerEngine's name, in a step."""
        return [
            one
            for one in self.logs
            if TENSORS.get(tensor, tensor) in one["tensors"]
            and matches(layer, one["layers"])
            and iteration % one["every"] == 0
            and (not one["ranges"] or any(first <= iteration <= last for first, last in one["ranges"]))
        ]

    def feed(self, layer: str, tensor: str, iteration: int, x: Tensor, rows: Any, columns: Any) -> None:
        """Adds what the entries of this step ask for of one tensor and its codes."""
        numbers = x.detach().dequantize() if isinstance(x, QuantizedTensor | QuantizedWeight) else x.detach()
        key, matrix = (layer, tensor, iteration), numbers.reshape(-1, numbers.shape[-1])
        sources: dict[Any, Callable[[], dict[str, Tensor]]] = {}
        for entry in self.due(*key):
            for stat in entry["stats"]:
                shown, source, word, make = self._source(stat, entry["feature"], tensor, matrix, rows, columns)
                if make is not None:
                    self.wanted.setdefault(key, {})[shown] = source, word
                    sources[source] = make
        kept = self.kept.setdefault(key, {}) if sources else {}
        for source, make in sources.items():
            made, before = make(), kept.get(source)
            kept[source] = (
                made if before is None else {name: _JOIN[name](before[name], one) for name, one in made.items()}
            )

    def _source(self, stat: Any, feature: str, tensor: str, x: Tensor, rows: Any, columns: Any) -> tuple[Any, ...]:
        """(the name in the log, a key of the sums, the formula, what makes the sums); None: nothing here does."""
        if isinstance(stat, Mapping) or str(stat).startswith("max_blockwise"):
            settings = next(iter(stat.values())) if isinstance(stat, Mapping) else {}
            blocks = BlockwiseDynamicRangeStat(
                settings.get("block_size", 32), settings.get("dims", 1), tensor in ("activation", "weight")
            )
            return str(blocks), blocks, "range", lambda: {"range": compute_max_blockwise_dynamic_range(x, blocks)}
        if stat in _OF_TENSOR:
            return stat, "x", stat, lambda: _sums(x)
        word, turned = stat.removesuffix("_columnwise"), stat.endswith("_columnwise")
        recipe = next((name for name in RECIPES_OF_TE if word.startswith(f"{name}_")), "")
        word, own = word.removeprefix(f"{recipe}_"), x.t() if turned else x
        codes = columns if turned else rows
        if recipe:  # of a cast that did not run
            cell = get_recipe(RECIPES_OF_TE[recipe]).cells(TENSORS[tensor])[turned]
            assert cell is not None
            codes = quantize(own.contiguous(), replace(cell, scaling="current"))
        made = None if word not in _OF_CAST or not isinstance(codes, Codes) else lambda: _cast_sums(own, codes)
        shown = f"nvfp4_{stat}" if feature == "LogNvfp4TensorStats" and not recipe else stat
        return shown, (recipe, turned), word, made

    def log_stats(self) -> dict[tuple[str, str, str, int], Tensor]:
        """(layer, tensor, statistic, iteration) -> fp32 (); the sums begin anew, and the numbers are written."""
        formulas = {**_OF_TENSOR, **_OF_CAST, "range": lambda s: s["range"]}
        found = {
            (layer, tensor, name, iteration): formulas[word](self.kept[layer, tensor, iteration][source]).float()
            for (layer, tensor, iteration), names in self.wanted.items()
            for name, (source, word) in names.items()
        }
        self.kept, self.wanted = {}, {}
        self.write({("_".join(key[:3]), key[3]): value for key, value in found.items()})
        return found

    def write(self, found: Mapping[tuple[str, int], Any]) -> None:
        """Appends a line for each (name, iteration) -> number; no file without one."""
        if not found:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            for (what, iteration), value in found.items():
                file.write(f"{now},000 - INFO - {what}\t\titeration={iteration:06d}\t\tvalue={float(value):.4f}\n")

    def end_step(self) -> None:
        """Writes the step's numbers."""
        self.log_stats()
        self.step += 1


class STATS_BUFFERS:
    """The buffers of the session."""

    @staticmethod
    def log_stats() -> dict[tuple[str, str, str, int], Tensor]:
        """Writes and returns the statistics since the last call."""
        return debug_tool().statistics.log_stats()  # type: ignore[no-any-return]


class MetricLogger:
    """The statistics log, for features of a script."""

    @staticmethod
    def log_scalar(name: str, value: Any, iteration: int) -> None:
        """Writes one line."""
        debug_tool().statistics.write({(name, iteration): value})


class Registry:
    """Takes features of a script; see `execution.Tool.inspected`."""

    @staticmethod
    def register_feature(namespace: str = "transformer_engine") -> Callable[[type], type]:
        """Decorates the class of a feature; configurations name it so."""
        return lambda made: debug_tool().features.update({made.__name__: made()}) or made


def api_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a method of a feature that the tool calls."""
    return method


class TEDebugState:
    """In ottava the session itself holds all state."""

    @staticmethod
    def _reset() -> None: ...


class ConfigManager:
    """Answers what the configuration of the session says."""

    @staticmethod
    def reset() -> None:
        """Forgets the configuration."""
        debug_tool().tree = {}

    @staticmethod
    def get_config_for_layer(layer_name: str) -> dict[str, Any]:
        """Namespace -> feature -> its settings, of all sections that name the layer; the later ones win."""
        found: dict[str, Any] = {}
        for name, section in debug_tool().tree.items():
            if section.get("enabled") and matches(layer_name, layer_patterns(name, section["layers"])):
                for key in section.keys() - {"enabled", "layers"}:
                    found[key] = {**found.get(key, {}), **section[key]}
        return found


class TEConfigAPIMapper:
    """Finds the settings of a feature for one GEMM and tensor."""

    def parse_config_and_api(
        self,
        config: Mapping[str, Any],
        *,
        gemm_parsing: bool = False,
        tensor_parsing: bool = False,
        gemm: str = "",
        tensor_name: str = "",
        **_: Any,
    ) -> tuple[bool, dict[str, Any] | None]:
        """(True, the settings) or (False, None)."""
        where = type(self).__name__
        for gemms in entries_of(where, config, "gemms", "gemm") if gemm_parsing else [dict(config)]:
            for entry in entries_of(where, gemms, "tensors", "tensor") if tensor_parsing else [gemms]:
                if (not gemm_parsing or gemm in entry["gemm"]) and (
                    not tensor_parsing or tensor_name in entry["tensor"]
                ):
                    own = {"gemm": gemm} if gemm_parsing else {}
                    own |= {"tensor": tensor_name} if tensor_parsing else {}
                    return True, {**{k: v for k, v in entry.items() if k != "enabled"}, **own}
        return False, None
