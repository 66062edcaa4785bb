"""What any checkpoint holds: each tensor's type, shape, largest magnitude and scales, and the scaling state in it.

    FILE.safetensors, a file of torch.save      one file
    a folder of Hugging Face's, a LoRA adapter  model.safetensors, or the files that the index names; config.json
    a folder of torch.distributed.checkpoint    its safetensors files
    a run of `ottava train`                     its newest checkpoint

No code of a file runs, see `safe_pickle`. One tensor is in memory at a time, unless torch.save wrote the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ottava.base.text import finite
from ottava.base.untrusted import UntrustedError, parse_json, read_text
from ottava.interop.safe_pickle import StandIn, StandInTensor
from ottava.interop.state_file import ScalingStateFile, StateFileError, is_state, read_entries, state_of

_CHUNK = 1 << 24
"""Elements that are looked at together."""
_CODES = ("float8", "float4", "uint8", "int8")
_SETTINGS = ("config.json", "adapter_config.json")


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    amax: float | None
    """Largest magnitude of its numbers as they are stored, of codes without their scale; None for whole numbers."""
    scale: str | None = None
    """Of codes: the name of the tensor beside it that holds their scales; None: it has none."""
    scale_min: float | None = None
    scale_max: float | None = None


@dataclass(frozen=True)
class Contents:
    """All tensors of a checkpoint."""

    path: Path
    tensors: tuple[TensorFacts, ...]
    """In the order of the file."""
    settings: Mapping[str, Any]
    """What config.json and adapter_config.json say, in a few words."""
    state: ScalingStateFile | None
    """The scaling state of ottava or TransformerEngine."""

    @property
    def summary(self) -> str:
        """One line: how many tensors and bytes, of which types."""
        kinds = Counter(one.dtype for one in self.tensors)
        counts = ", ".join(f"{count:,} {dtype}" for dtype, count in kinds.most_common())
        size = sum(one.nbytes for one in self.tensors)
        return f"{self.path}: {len(self.tensors):,} tensors, {size:,} bytes: {counts}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; the scaling state as in `ScalingStateFile.to_dict`, empty without one."""
        state = {"source": None, "recipes": [], "rows": []} if self.state is None else self.state.to_dict()
        tensors = [asdict(one) for one in self.tensors]
        return {**state, "file": str(self.path), "settings": dict(self.settings), "tensors": finite(tensors)}


def read_contents(path: Path | str) -> Contents:
    """Reads what a checkpoint holds.

    Raises:
        StateFileError: it is missing or damaged, holds no tensor, or reading it would run code.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import save_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "model.safetensors")
        ...     save_file({"up.weight": torch.tensor([[1.0, -3.0]])}, file)
        ...     read_contents(file).tensors[0]
        TensorFacts(name='up.weight', dtype='float32', shape=(1, 2), nbytes=8, amax=3.0, scale=None, scale_min=None, \
scale_max=None)
    """
    path = Path(path)
    if path.is_dir() and (steps := sorted((path / "checkpoints").glob("step-*"))):
        path = steps[-1]
    tensors: list[TensorFacts] = []
    ranges: dict[str, tuple[float, float]] = {}
    kept: dict[str, Any] = {}
    for entry, value in read_entries(path):
        if is_state(entry):
            kept[entry] = value
        for name, tensor in _tensors(entry, value):
            dtype = str(tensor.dtype).removeprefix("torch.")
            size = tensor.numel() * tensor.element_size()
            tensors.append(TensorFacts(name, dtype, tuple(tensor.shape), size, _amax(tensor)))
            if "scale" in name.rpartition(".")[2] and (found := _range(tensor)) is not None:
                ranges[name] = found
    state = state_of(path, kept)
    if not tensors and state is None:
        raise StateFileError(f"{path}: holds no tensor; needs a checkpoint")
    return Contents(path, tuple(_with_scale(one, ranges) for one in tensors), _settings(path), state)


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors in one entry. Those inside other packages' tensors have the name of their attribute behind a dot."""
    if isinstance(value, StandInTensor):
        for attribute, inner in vars(value).items():
            yield from _tensors(f"{name}.{attribute}", inner)
    elif isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, StandIn):
        for i, inner in enumerate((*value.args, value.state)):
            yield from _tensors(f"{name}.{i}", inner)
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _tensors(f"{name}.{i}", inner)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(f"{name}.{key}", inner)


def _amax(tensor: Tensor) -> float | None:
    if not tensor.is_floating_point() or not tensor.numel() or "float4" in str(tensor.dtype):
        return None
    parts = tensor.detach().reshape(-1).split(_CHUNK)
    return float(torch.stack([part.float().abs().amax() for part in parts]).amax())  # NaN stays NaN


def _range(scale: Tensor) -> tuple[float, float] | None:
    """Smallest and largest scale; bytes are those of E8M0."""
    if not scale.numel():
        return None
    numbers = (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()
    return float(numbers.amin()), float(numbers.amax())


def _with_scale(one: TensorFacts, ranges: Mapping[str, tuple[float, float]]) -> TensorFacts:
    """With the scales that stand beside codes, under the names of ottava, Hugging Face, torchao and GPT-OSS."""
    if not one.dtype.startswith(_CODES) or one.name in ranges:
        return one
    base, last = one.name.removesuffix("_packed"), one.name.rpartition(".")[2]
    names = [f"{base}_scale_inv", f"{base}_scale", one.name.replace("_blocks", "_scales")]
    names += [one.name.removesuffix(last) + "scale"] if last == "qdata" else []
    name = next((name for name in names if name in ranges), None)
    if name is None:
        return one
    return TensorFacts(one.name, one.dtype, one.shape, one.nbytes, one.amax, name, *ranges[name])


def _settings(path: Path) -> dict[str, Any]:
    """The words of config.json and adapter_config.json that say what the tensors are."""
    folder, found = (path if path.is_dir() else path.parent), {}
    for name in _SETTINGS:
        if not (folder / name).is_file():
            continue
        try:
            values = parse_json(read_text(folder / name))
        except UntrustedError as error:
            raise StateFileError(f"{folder / name}: {error}") from error
        if not isinstance(values, dict):
            raise StateFileError(f"{folder / name}: needs one JSON object")
        keys = ("model_type", "quantization_config", "peft_type", "r", "lora_alpha", "target_modules")
        found |= {key: values[key] for key in (*keys, "base_model_name_or_path") if values.get(key) is not None}
    return found
