"""What a checkpoint is made of: the tensors of a folder, under the names that engines know; `trained` has models.

A `Weight` knows the cast that the trained forward used, so that the same codes can be written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ottava.base.untrusted import UntrustedError
from ottava.numerics.scaling import Granularity
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.recipe import default_filter
from ottava.weights.layouts import (
    INPUT_KEYS,
    is_codes,
    is_scale,
    open_tensors,
    read_codes,
    read_config,
    read_quantization,
    scales_of,
)

TURNED = "it is a Conv1D, which holds W.T, and engines cast nn.Linear only"
"""Why such a weight stays in high precision."""
_OTHERS = ("embed", "wte", "wpe", "norm", "position", "rotary", "relative_attention_bias")


class Unread(NamedTuple):
    """What stays in its file until somebody calls `read`."""

    shape: tuple[int, ...]
    read: Callable[[], Any]


@dataclass(frozen=True, eq=False)
class Weight:
    """A tensor of a checkpoint."""

    name: str
    """In the checkpoint."""
    values: Tensor | Unread
    """Its numbers, or where they are."""
    linear: bool = False
    """Whether it is the weight of a linear (N, K)."""
    stays: str = ""
    """Why a linear stays in high precision; "" if it is to be quantized."""
    codes: QuantizedTensor | Unread | None = None
    """Its cast in the trained forward, or where it is."""
    input_scale_inv: float | None = None
    """scale_inv of the activations, from a history."""
    input_spec: QuantizationSpec | None = None
    """The cast of its input in the trained forward."""
    layer: str = ""
    """The layer that multiplies it in training."""

    @property
    def tensor(self) -> Tensor:
        """Its numbers; of a weight that exists only in FP8 the decoded ones. Read anew at each look, if in a file."""
        return self.values.read() if isinstance(self.values, Unread) else self.values

    @property
    def cast(self) -> QuantizedTensor | None:
        """Its cast in the trained forward; None: it has none."""
        return self.codes.read() if isinstance(self.codes, Unread) else self.codes

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor, which is not read for it."""
        return tuple(self.values.shape)

    @property
    def module(self) -> str:
        """Name of the module that holds it."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Source:
    """The content of a checkpoint before it is quantized."""

    weights: tuple[Weight, ...]
    config: Mapping[str, Any]
    """Of config.json, without a quantization_config."""
    files: tuple[Path, ...] = ()
    """Other files to copy: tokenizer, generation settings, templates."""


def same_numbers(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Whether two casts stand for the same numbers, bit for bit; codes and scales may differ.

    A weight in MXFP8 that is decoded and cast again keeps every number. Where the largest one of a block was rounded
    down to a power of two times 448, the block gets half of its scale, and other codes.

    Example:
        >>> from ottava.ops.quantize import quantize
        >>> from ottava.numerics.formats import E4M3
        >>> from ottava.numerics.scaling import BLOCK_1X32
        >>> spec = QuantizationSpec(E4M3, BLOCK_1X32, "e8m0")
        >>> one = quantize(torch.full((1, 32), 450.0), spec)
        >>> two = quantize(one.dequantize(), spec)
        >>> same_numbers(one, two), float(one.scale_inv), float(two.scale_inv)
        (True, 2.0, 1.0)
    """
    return torch.equal(a.dequantize(torch.float32).cpu(), b.dequantize(torch.float32).cpu())


def of_folder(folder: Path) -> Source:
    """The checkpoint in a folder of Hugging Face's: in high precision, or in FP8 as `load_fp8` reads it.

    No tensor is read before somebody looks at it, and none is kept then.

    Raises:
        UntrustedError: the folder is damaged, or quantized in another way.
    """
    if not folder.exists():
        raise UntrustedError(f"{folder} does not exist; needs a checkpoint or a run of ottava train")
    if not (folder / "config.json").is_file():
        raise UntrustedError(f"{folder} has no config.json; needs a checkpoint or a run of ottava train")
    try:
        config = read_config(folder)
        said = config.pop("quantization_config", None)
        sizes = read_quantization(said).blocks if said else ()
        with ExitStack() as files:
            tensors = open_tensors(folder, files)
            turned = turned_names({n: tuple(file.get_slice(n).get_shape()) for n, file in tensors.items()})
            weights = [_of_codes(name, tensors, sizes) if is_codes(name, tensors) else _in_file(name, tensors, turned)
                       for name in tensors if not is_scale(name, tensors)]  # fmt: skip
            files.pop_all()  # the tensors' readers hold the files, which close with the last of them
    except (UntrustedError, OSError) as error:
        raise UntrustedError(f"{folder} cannot be read: {error}") from error
    kinds = (".json", ".txt", ".model", ".jinja", ".py", ".md", ".tiktoken")
    others = (path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix in kinds)
    left = ("config.json", "export.json")
    kept = (path for path in others if path.name not in left and "safetensors" not in path.name)
    return Source(tuple(weights), config, tuple(kept))


def turned_names(shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """The last names of the modules that are Conv1Ds: somewhere the length of a bias is that of the columns only.

    Args:
        shapes: of all tensors of a checkpoint, by name.

    Example:
        >>> turned_names({"h.0.c_fc.weight": (8, 32), "h.0.c_fc.bias": (32,)})
        {'c_fc'}
    """
    found: dict[str, list[tuple[bool, bool]]] = {}
    for name, shape in shapes.items():
        bias = shapes.get(f"{name.removesuffix('weight')}bias", ())
        if name.endswith(".weight") and len(shape) == 2 and len(bias) == 1:
            found.setdefault(name.split(".")[-2], []).append((bias[0] == shape[0], bias[0] == shape[1]))
    return {last for last, fits in found.items() if (False, True) in fits and all(cols for _, cols in fits)}


def _in_file(name: str, tensors: Mapping[str, Any], turned: Collection[str]) -> Weight:
    file = tensors[name]
    weight = of_file(name, Unread(tuple(file.get_slice(name).get_shape()), partial(file.get_tensor, name)))
    is_turned = weight.linear and weight.module.rpartition(".")[2] in turned
    return replace(weight, stays=TURNED) if is_turned else weight


def _of_codes(name: str, tensors: Mapping[str, Any], sizes: Sequence[Granularity]) -> Weight:
    scale_inv, spec = scales_of(name, tensors, sizes)
    file = tensors[name]
    shape = tuple(file.get_slice(name).get_shape())

    def codes() -> QuantizedTensor:
        return QuantizedTensor(read_codes(name, tensors), scale_inv, spec, torch.bfloat16)

    decoded = Unread(shape, lambda: codes().dequantize(torch.float32))
    static = next((key for last in INPUT_KEYS if (key := name.removesuffix("weight") + last) in tensors), None)
    scale = None if static is None else float(tensors[static].get_tensor(static).float().amax())
    return Weight(name, decoded, True, "", Unread(shape, codes), scale)


def is_linear(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor of a file is a linear's weight: every matrix is, unless its name says otherwise."""
    last = name.lower().removesuffix(".weight").rpartition(".")[2]
    return name.endswith(".weight") and len(shape) == 2 and not any(word in last for word in _OTHERS)


def of_file(name: str, tensor: Tensor | Unread, *, only_routers: bool = False) -> Weight:
    """A tensor of which only name and shape are known."""
    module = name.removesuffix(".weight")
    if not is_linear(name, tensor.shape):
        return Weight(name, tensor)
    with torch.device("meta"):
        like = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False)
    stays = default_filter(module, like) or ""
    return Weight(name, tensor) if only_routers and not stays else Weight(name, tensor, True, stays)
