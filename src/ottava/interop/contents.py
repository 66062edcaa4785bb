"""What any checkpoint holds: each tensor's type, shape, largest magnitude and scales, and the scaling state in it.

    FILE.safetensors, a file of torch.save      one file
    a folder of Hugging Face's, a LoRA adapter  model.safetensors, or the files that the index names; config.json
    a folder of torch.distributed.checkpoint    its safetensors files
    a run of `ottava train`                     its newest checkpoint

The scaling state of a file, and who wrote it:

    ottava              NAME.quantizers.{input|weight|grad_output}.{amax_history|scale|nonfinite_count|guard_count},
                        plain tensors; a history is newest first
    TransformerEngine   NAME._extra_state, a pickle in a uint8 tensor (2.x) or a file of torch.save in a BytesIO (1.x):
                        scale_fwd (n,), amax_history_fwd (L, n), the same _bwd, and the recipe. Columns of fwd: input,
                        weight, output of the 1st GEMM, of the 2nd, ...; of bwd: grad_output, grad_input of the 1st, ...
                        Row 0 is where amaxes are staged; rows 1 .. L-1 are the history, oldest first.

Both keep the scale that multiplies. The check: the scale follows from its history, scale * amax = fmt.max * 2**-margin.
Source: TransformerEngine pytorch/module/base.py (get_extra_state), pytorch/csrc/common.h (columns),
common/recipe/delayed_scaling.cu (rows).

No code of a file runs, see `safe_pickle`. One tensor is in memory at a time, unless torch.save wrote the file.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from ottava.base.text import columns, finite, grouped, progress
from ottava.base.untrusted import (
    MAX_DEPTH,
    MAX_PARTS,
    LimitError,
    UntrustedError,
    opened,
    parse_json,
    read_index,
    read_text,
)
from ottava.interop.safe_pickle import RefusedError, StandIn, StandInTensor, check_tensors, load_pickle, load_torch
from ottava.numerics.formats import E4M3, E5M2, Format

_OURS = re.compile(
    r"(?:(?P<layer>.+)\.)?quantizers\.(?P<tensor>input|weight|grad_output)"
    r"\.(?P<part>amax_history|scale|nonfinite_count|guard_count)"
)
_PARTS = ("amax_history", "scale", "nonfinite_count", "guard_count")
_EXTRA_STATE = "_extra_state"
COLUMNS = MappingProxyType({"fwd": ("input", "weight", "output"), "bwd": ("grad_output", "grad_input")})
"""TransformerEngine's slots of a GEMM, by direction."""
_TORCH_FILES = ("*.bin", "*.pt", "*.pth")
_TORCH_MAGIC = (b"PK\x03\x04", b"\x80")
_FP32_MAX = torch.finfo(torch.float32).max
_ROUNDING = 4 * torch.finfo(torch.float32).eps
_LARGEST_MARGIN = 16
_HEADER = ("layer", "tensor", "history", "newest", "largest", "scale", "non-finite", "guard", "scale follows from")


class StateFileError(ValueError):
    """A file has no readable scaling state; the message names the file, the reason, and what to do."""

    exit_code = 4


@dataclass(frozen=True, slots=True)
class TensorState:
    """The scaling state of one tensor."""

    layer: str
    """Name in the file."""
    tensor: str
    """input, weight, grad_output; in TransformerEngine also output, grad_input."""
    history_len: int
    """Length of the history."""
    filled: int
    """Entries of the history that are not 0."""
    newest: float
    """Amax of the last step; 0 if there is none."""
    largest: float
    """Largest entry of the history."""
    scale: float
    """The factor of the next cast."""
    follows: str | None
    """How the scale follows from the history, such as "E4M3, max, margin 0"; None if unknown."""
    nonfinite: int | None = None
    """Steps with an amax of inf or nan; TransformerEngine does not count them."""
    guard_fires: int | None = None
    """Steps in which the guard fired."""
    problems: tuple[str, ...] = ()
    """Contradictions."""
    notes: tuple[str, ...] = ()
    """Facts worth knowing."""


@dataclass(frozen=True)
class ScalingStateFile:
    """The scaling state of a file."""

    path: Path
    source: Literal["ottava", "transformer_engine"]
    """The program that wrote the state."""
    recipes: tuple[str, ...]
    """TransformerEngine's recipes in words; an ottava checkpoint has none."""
    rows: tuple[TensorState, ...]
    """In the order of the file."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; a number that is not finite becomes None."""
        return {
            "file": str(self.path),
            "source": self.source,
            "recipes": list(self.recipes),
            "rows": finite([asdict(row) for row in self.rows]),
        }

    @property
    def problems(self) -> list[str]:
        """All problems, each with its tensor."""
        return [f"{row.layer} {row.tensor}: {text}" for row in self.rows for text in row.problems]

    def __str__(self) -> str:
        lines = [f"{self.path}: scaling state of {self.source}, {len(self.rows)} tensors", *self.recipes, ""]
        lines += columns(_HEADER, *map(_row, self.rows))
        problems, notes = _grouped(self.rows, "problems"), _grouped(self.rows, "notes")
        return "\n".join([*lines, "", *(f"problem: {p}" for p in problems), *(f"note: {n}" for n in notes)]).rstrip()


def _row(row: TensorState) -> tuple[str, ...]:
    counts = ("-" if count is None else f"{count:,}" for count in (row.nonfinite, row.guard_fires))
    numbers = (f"{number:.4g}" for number in (row.newest, row.largest, row.scale))
    return (row.layer, row.tensor, f"{row.filled}/{row.history_len}", *numbers, *counts, row.follows or "-")


def _grouped(rows: tuple[TensorState, ...], field: str) -> Iterator[str]:
    """Each remark once, with its tensors."""
    about = grouped((text, f"{row.layer} {row.tensor}".strip()) for row in rows for text in getattr(row, field))
    for text, names in about.items():
        others = f" and {len(names) - 1} others" if len(names) > 1 else ""
        yield f"{names[0]}{others}: {text}"


def state_of(path: Path, entries: Mapping[str, Any]) -> ScalingStateFile | None:
    """The state in these entries of a file; None if there is none."""
    if rows := _ours(path, entries):
        return ScalingStateFile(path, "ottava", (), tuple(rows))
    rows, recipes = _transformer_engine(path, entries)
    return ScalingStateFile(path, "transformer_engine", tuple(recipes), tuple(rows)) if rows else None


def read_entries(path: Path) -> Iterator[tuple[str, Any]]:
    """The entries of a checkpoint: dicts in dicts as one level, in the order of the files.

    Args:
        path: a safetensors file, a file of `torch.save`, or a folder: its safetensors files, those that an index names,
            or else its files of `torch.save`.
    Raises:
        StateFileError: a file is missing or damaged, or reading it would run code.
    """
    files = _files(path)
    for file in progress(files, "reading files"):
        try:
            with opened(file) as stream:
                size = os.fstat(stream.fileno()).st_size
                first = stream.read(9)  # a header of 128 + 256 n bytes begins as a pickle does
                is_torch = first.startswith(_TORCH_MAGIC) and first[6:] != b"\0\0{"
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            raise StateFileError(f"{file}: {'does not exist' if missing else error.strerror}") from error
        except UntrustedError as error:
            what = "is a folder without safetensors files; needs one with them, or a file" if path.is_dir() else error
            raise StateFileError(f"{path}: {what}") from error
        try:
            for name, value in flattened(load_torch(file)) if is_torch else _safetensors(file):
                check_tensors(value, size)
                yield name, value
        except RefusedError as error:
            raise StateFileError(
                f"{file}: {error}; save the model's state alone: torch.save(model.state_dict(), FILE)"
            ) from error
        except Exception as error:  # damaged bytes lead to errors of any kind
            kind = "file of torch.save" if is_torch else "safetensors file, nor one of torch.save"
            raise StateFileError(f"{file}: is cut short, damaged or no {kind} ({_first_line(error)})") from error


def _files(path: Path) -> list[Path]:
    """The files of a checkpoint; a folder without any is returned itself."""
    index = next(iter(sorted(path.glob("*.index.json"))), None)
    if index is None:
        return sorted(path.glob("*.safetensors")) or [f for s in _TORCH_FILES for f in sorted(path.glob(s))] or [path]
    try:
        return [path / name for name in sorted(set(read_index(index).values()))]
    except UntrustedError as error:
        raise StateFileError(f"{index}: {error}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _safetensors(path: Path) -> Iterator[tuple[str, Any]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # not a mapping
            yield name, file.get_tensor(name)


def flattened(tree: Any) -> Iterator[tuple[str, Any]]:
    """The entries of dicts in dicts, names joined by dots; other objects are entries."""
    waiting, visits = [("", tree, 0)], 0
    while waiting:
        name, value, depth = waiting.pop()
        visits += 1
        if visits > MAX_PARTS or depth > MAX_DEPTH:  # dicts may contain each other, or share entries
            raise LimitError(f"has more than {MAX_PARTS:,} entries, or more than {MAX_DEPTH} dicts within dicts")
        if isinstance(value, dict):
            below = [(f"{name}.{key}" if name else str(key), item, depth + 1) for key, item in value.items()]
            waiting += reversed(below)
        else:
            yield name, value


@dataclass(frozen=True)
class _Law:
    """What the file tells about the rule that predicted the scales."""

    formats: tuple[Format, ...] = (E4M3, E5M2)
    """Possible formats, smallest range first."""
    margin: int | None = None
    algorithm: str | None = None
    """max, most_recent, None if unknown, "" for a function."""
    forgets: bool = False
    """TransformerEngine computes a scale from L amaxes and keeps only L - 1 of them in the file, without the oldest."""

    def explain(self, scale: float, history: list[float]) -> str | None:
        """How the scale follows from the history: scale * amax = fmt.max * 2**-margin; None if it does not."""
        newest, largest = history[0], max(history)
        for algorithm, amax in (("max", largest), ("most_recent", newest)):
            if amax == 0 or self.algorithm not in (None, algorithm):
                continue
            for fmt in self.formats:
                octaves = math.log2(fmt.max / (scale * amax))
                margin = round(octaves)
                if abs(2.0 ** (octaves - margin) - 1) <= _ROUNDING and margin in self._margins():
                    return f"{fmt}, {algorithm}, margin {margin}"
        lowest, highest = (self.formats[i].max * 2.0 ** -self._margins()[j] for i, j in ((0, -1), (-1, 0)))
        if self.margin is None and math.frexp(scale)[0] == 0.5 and lowest / 2 < scale * largest <= highest:
            return "a power of two"  # rounded down, from an unknown number
        if scale == _FP32_MAX:
            return "the largest fp32 number"
        if self.forgets and self.algorithm != "most_recent" and all(history) and scale * largest < highest:
            return "an older amax"
        return None

    def _margins(self) -> range:
        return range(_LARGEST_MARGIN + 1) if self.margin is None else range(self.margin, self.margin + 1)


def _judge(layer: str, tensor: str, history: Tensor, scale: Tensor, law: _Law, **counts: int) -> TensorState:
    """The row of one tensor. history: (L,), newest first."""
    values = history.to(torch.float64).tolist()
    factor = float(scale)
    filled = sum(value != 0 for value in values)
    newest, largest = (values[0], max(values)) if values else (0.0, 0.0)
    problems, notes = [], []
    follows = None
    if not all(math.isfinite(value) and value >= 0 for value in [*values, factor]):
        problems.append("has negative or non-finite entries, so the state cannot be loaded")
    elif filled and factor == 0:
        problems.append("has a history, but its scale is 0")
    elif filled and law.algorithm != "":
        follows = law.explain(factor, values)
        if follows is None:
            problems.append(
                "the scale does not follow from the history; only a custom function of the recipe could give it"
            )
    elif not filled and factor == 0:
        notes.append("no history yet: the next cast takes the current scale")
    elif not filled and factor == 1:
        notes.append("no history yet: the next cast multiplies by 1")
    elif not filled and not law.forgets:
        problems.append("has a scale without a history")
    if counts.get("nonfinite"):
        notes.append("had steps with an amax of inf or nan; the history leaves them out")
    seen = (counts.get("nonfinite"), counts.get("guard_fires")), tuple(problems), tuple(notes)
    return TensorState(layer, tensor, len(values), filled, newest, largest, factor, follows, *seen[0], *seen[1:])


def _ours(path: Path, entries: Mapping[str, Any]) -> list[TensorState]:
    doors: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name, value in entries.items():
        if match := _OURS.fullmatch(name):
            doors.setdefault((match["layer"] or "", match["tensor"]), {})[match["part"]] = value
    rows = []
    for (layer, tensor), parts in doors.items():
        where = f"{path}: {layer}.quantizers.{tensor}"
        if missing := [part for part in _PARTS if part not in parts]:
            raise StateFileError(f"{where}: lacks {', '.join(missing)}; somebody cut or filtered the file")
        for part in _PARTS:
            value, dims = parts[part], int(part == "amax_history")
            kind = torch.int64 if part.endswith("_count") else torch.float32
            if not isinstance(value, Tensor) or value.dim() != dims or value.dtype != kind:
                raise StateFileError(
                    f"{where}.{part}: needs a {kind} tensor of {dims} dimensions; this is not ottava's state"
                )
        counts = {"nonfinite": int(parts["nonfinite_count"]), "guard_fires": int(parts["guard_count"])}
        rows.append(_judge(layer, tensor, parts["amax_history"], parts["scale"], _Law(), **counts))
    return rows


def _transformer_engine(path: Path, entries: Mapping[str, Any]) -> tuple[list[TensorState], list[str]]:
    rows: list[TensorState] = []
    recipes: dict[str, None] = {}
    for name, value in entries.items():
        state = read_extra_state(path, name, value)
        if not isinstance(state, dict) or "scale_fwd" not in state:
            continue  # empty, or a recipe without state
        recipe, extra = state.get("recipe"), state.get("extra_fp8_variables")
        settings = recipe.state if isinstance(recipe, StandIn) and isinstance(recipe.state, dict) else {}
        if isinstance(recipe, StandIn):
            words = [f"{k}={v!r}" for k, v in settings.items() if isinstance(v, bool | int | float | str)]
            maxima = format_maxima(settings.get("fp8_format"))
            words += [f"largest numbers {maxima[0]} forward, {maxima[1]} backward"] if len(maxima) == 2 else []
            recipes.setdefault(f"{recipe.qualified_name.rpartition('.')[2]}({', '.join(words)})")
        layer = name.removesuffix(_EXTRA_STATE).removesuffix(".")
        for direction, roles in COLUMNS.items():
            scale, history = state.get(f"scale_{direction}"), state.get(f"amax_history_{direction}")
            law = _law(settings, extra if isinstance(extra, dict) else {}, direction)
            if (
                not isinstance(scale, Tensor)
                or not isinstance(history, Tensor)
                or scale.dim() != 1
                or history.shape[1:] != scale.shape
                or len(scale) % len(roles)
            ):
                shapes = [tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__ for v in (scale, history)]
                raise StateFileError(
                    f"{path}: {name}: {direction} scale and amax_history are {shapes}; need (n,) and (L, n) with "
                    f"n = {len(roles)} per GEMM"
                )
            rows += _columns(layer, roles, scale, history, law)
    return rows, list(recipes)


def read_extra_state(path: Path | str, name: str, value: Any) -> Any:
    """The state of one module in TransformerEngine's format, read without executing it; None if it is empty.

    Args:
        path, name: of the file and the entry, for messages.
        value: a uint8 tensor, a BytesIO, or None.
    Raises:
        StateFileError: the value is something else, is damaged, or would have to be executed.
    """
    if isinstance(value, io.BytesIO):
        data = value.getvalue()
    elif isinstance(value, Tensor) and value.dtype == torch.uint8:
        data = value.cpu().numpy().tobytes()
    elif value is None:
        data = b""
    else:
        raise StateFileError(
            f"{path}: {name}: got {type(value).__name__}; needs a uint8 tensor or BytesIO of TransformerEngine"
        )
    try:
        state = None if not data else load_torch(data) if data.startswith(_TORCH_MAGIC[0]) else load_pickle(data)
        check_tensors(state, len(data))
        return state
    except RefusedError as error:
        raise StateFileError(f"{path}: {name}: {error}; it was not read") from error
    except Exception as error:  # damaged bytes again
        raise StateFileError(f"{path}: {name}: is cut short or damaged ({_first_line(error)})") from error


def _columns(layer: str, columns: tuple[str, ...], scale: Tensor, history: Tensor, law: _Law) -> Iterator[TensorState]:
    gemms = len(scale) // len(columns)
    for column in range(len(scale)):
        gemm, role = divmod(column, len(columns))
        newest_first = history[1:, column].flip(0)
        used = bool(newest_first.any()) or float(scale[column]) != 1
        if not used and columns[role] in ("output", "grad_input"):  # columns for FP8 outputs, which hardly any run has
            continue
        yield _judge(
            f"{layer} GEMM {gemm + 1}" if gemms > 1 else layer, columns[role], newest_first, scale[column], law
        )


def _law(settings: Mapping[str, Any], extra: Mapping[str, Any], direction: str) -> _Law:
    largest = extra.get(f"fp8_max_{direction}")
    if largest is None:
        largest = dict(zip(("fwd", "bwd"), format_maxima(settings.get("fp8_format")), strict=False)).get(direction)
    formats = tuple(fmt for fmt in (E4M3, E5M2) if fmt.max == largest)
    margin, algorithm = settings.get("margin"), settings.get("amax_compute_algo")
    if settings.get("scaling_factor_compute_algo") is not None or not isinstance(algorithm, str | None):
        algorithm = ""
    return _Law(formats or (E4M3, E5M2), margin if isinstance(margin, int) else None, algorithm, forgets=True)


def format_maxima(fp8_format: Any) -> tuple[Any, ...]:
    """(largest number forward, backward) of TransformerEngine's Format, an enum whose value is a pair."""
    value = fp8_format.args[0] if isinstance(fp8_format, StandIn) and fp8_format.args else ()
    pair = value.args if isinstance(value, StandIn) else value
    return tuple(pair) if isinstance(pair, tuple) else ()


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
        if entry.endswith(_EXTRA_STATE) or _OURS.fullmatch(entry):
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
    if isinstance(value, Tensor) and not isinstance(value, StandInTensor):
        yield name, value
        return
    held = vars(value) if isinstance(value, StandInTensor) else value
    held = (*value.args, value.state) if isinstance(value, StandIn) else held
    if isinstance(held, list | tuple | Mapping):
        for key, inner in held.items() if isinstance(held, Mapping) else enumerate(held):
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
    folder = path if path.is_dir() else path.parent
    found: dict[str, Any] = {}
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
