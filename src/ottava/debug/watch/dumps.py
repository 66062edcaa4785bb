"""Tensors written out as they are, one safetensors file each, and read back: no pickle, no version of ours needed.

    tensor   `codes` (raw, one a byte), `scale_inv`, `x` before the cast (all of it, or some rows and their `rows`)
    gemms    `x` (M, K), `w` (N, K), `dy` (M, N) of one layer, whole: what its three GEMMs would get
    batch    `batch.0`, `batch.1`, ... and how they were nested

Beside them `random.<device>`, the states of torch's generators at that moment; the header says what each one is, as
JSON. A file is whole or not there: it is written under another name and renamed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ottava.debug.random_state import random_states
from ottava.debug.run.schema import SlotKey
from ottava.debug.run.writer import RunWriter
from ottava.errors import unknown_name
from ottava.files import replacing
from ottava.quantized_tensor import QuantizationSpec, QuantizedTensor
from ottava.recipe import GEMMS, Recipe
from ottava.untrusted import UntrustedError, parse_json, regular_size

_FORMAT = "ottava.debug.dump/1"
_KINDS = ("tensor", "gemms", "batch")
_HEADER_BYTES = 4096
_NAME_BYTES = 200
_UNSAFE = re.compile(r"[^\w.-]")


class DumpError(ValueError):
    """A dump cannot be written or read; the message names the file, why, and what to do."""

    exit_code = 4


@dataclass(frozen=True, eq=False)
class TensorDump:
    """One cast of one tensor."""

    path: Path
    step: int
    key: SlotKey
    """Which cast of which run."""
    x: Tensor
    """Before the cast: (R, C), or only the rows `rows` of it."""
    rows: Tensor | None
    """int64: which rows x holds; None for all of them."""
    x_q: QuantizedTensor | None
    """After it, whole; None where the tensor was not cast."""
    random: Mapping[str, Tensor]
    """States of torch's generators."""


@dataclass(frozen=True, eq=False)
class GemmDump:
    """The operands of one layer's three GEMMs in one step, before any cast."""

    path: Path
    step: int
    layer: str
    """Full name."""
    recipe: Recipe
    """What the layer ran; overrides applied."""
    x: Tensor
    """(M, K)"""
    w: Tensor
    """(N, K)"""
    dy: Tensor
    """(M, N)"""
    random: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class BatchDump:
    """What a step was trained on."""

    path: Path
    step: int
    batch: Any
    """Tensors in tuples, lists and dicts as they were given."""
    random: Mapping[str, Tensor]
    """States of torch's generators before its forward."""


Dump = TensorDump | GemmDump | BatchDump


class Dumper:
    """Writes dumps into a run folder until its quota is used up, and then says so once and goes on without; so it does
    where the disk refuses one, if the writer is patient.

    Args:
        writer: of the run; its folder of dumps is made when the first one comes.
        quota_bytes: for all files in that folder, those of other ranks and of earlier starts too.
        rows: of the original that are kept beside the codes, evenly spread and with that of the largest element; 0
            keeps all.

    Example:
        >>> import tempfile, ottava
        >>> x, key = torch.randn(64, 64), SlotKey("fc1", "input", "row", "tensorwise", *("",) * 4, "door")
        >>> x_q = ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3))
        >>> with tempfile.TemporaryDirectory() as folder, RunWriter(folder) as writer:
        ...     path = Dumper(writer, 10_000_000, 16).dump(7, key, x, x_q)
        ...     dump = read_dump(path)
        >>> dump.step, dump.key.layer, dump.x.shape, dump.x_q.dequantize().shape
        (7, 'fc1', torch.Size([16, 64]), torch.Size([64, 64]))
    """

    def __init__(self, writer: RunWriter, quota_bytes: int, rows: int = 256) -> None:
        self.writer, self.quota_bytes, self.rows = writer, quota_bytes, rows
        self.refused = 0
        """Dumps for which there was no room."""

    def dump(self, step: int, key: SlotKey, x: Tensor, x_q: QuantizedTensor | None) -> Path | None:
        """Writes one cast: x (R, C) before it, x_q after it. None if there is no room."""
        rows = _spread_rows(x, self.rows)
        tensors = {"x": x if rows is None else x[rows.to(x.device)]}
        facts: dict[str, Any] = {"key": key._asdict()}
        if rows is not None:
            tensors["rows"] = rows
        if x_q is not None:
            tensors |= {"codes": x_q.data, "scale_inv": x_q.scale_inv}
            facts |= {"spec": _spec(x_q.spec).to_dict(), "dtype": str(x_q.dtype)}
        name = f"{key.layer}.{key.tensor}.{key.direction}.{key.recipe}"
        facts_of_event = {"layer": key.layer, "tensor": key.tensor}
        return self._write("tensor", step, name, tensors, facts, facts_of_event)

    def dump_gemms(self, step: int, layer: str, recipe: Recipe, x: Tensor, w: Tensor, dy: Tensor) -> Path | None:
        """Writes the operands of a layer's GEMMs: x (M, K), w (N, K), dy (M, N). None if there is no room."""
        plain = dataclasses.replace(
            recipe,
            overrides=(),
            **{
                gemm: dataclasses.replace(cells, lhs=_maybe(cells.lhs), rhs=_maybe(cells.rhs))
                for gemm in GEMMS
                for cells in [getattr(recipe, gemm)]
            },
        )
        tensors = {"x": x, "w": w, "dy": dy}
        facts = {"layer": layer, "recipe": plain.to_dict()}
        return self._write("gemms", step, f"{layer}.gemms", tensors, facts, {"layer": layer, "tensor": "gemms"})

    def dump_batch(self, step: int, batch: Any, random: Mapping[str, Tensor] | None = None) -> Path | None:
        """Writes a batch: see `save_batch`. None if there is no room."""
        tensors, structure = _flatten(batch)
        facts = {"structure": structure}
        return self._write("batch", step, "batch", tensors, facts, {"layer": "", "tensor": "batch"}, random)

    def _write(
        self,
        kind: str,
        step: int,
        name: str,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        place: Mapping[str, str],
        random: Mapping[str, Tensor] | None = None,
    ) -> Path | None:
        folder = self.writer.dumps
        size = sum(tensor.nbytes for tensor in tensors.values()) + _HEADER_BYTES
        with self.writer.attempt(step, loses="dumps"):
            folder.mkdir(parents=True, exist_ok=True)
            used = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            if used + size <= self.quota_bytes:
                path = folder / f"{_short(f'step-{step:06d}.rank-{self.writer.rank}.{name}')}.safetensors"
                nbytes = _save(path, kind, step, tensors, facts, random)
                self.writer.event(step, "dump", file=path.name, **place, nbytes=nbytes)
                return path
            if not self.refused:
                text = (
                    f"dumps stop here: {name} needs {size:,} bytes, and {used:,} of the quota of {self.quota_bytes:,} "
                    "are used; raise dump.quota_gb, lower dump.rows, or move old dumps away"
                )
                self.writer.event(step, "warning", text=text)
            self.refused += 1
        return None


def save_batch(path: Path | str, batch: Any, random: Mapping[str, Tensor] | None = None, step: int = 0) -> Path:
    """Writes a batch to a file of its own.

    Args:
        batch: a tensor, or tensors, numbers, strings and None in tuples, lists and dicts.
        random: states of torch's generators before its forward; None takes those of now.
    Raises:
        DumpError: the batch holds something else, or the file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = save_batch(Path(folder) / "batch.safetensors", {"ids": torch.arange(3), "scale": 2.0}, step=9)
        ...     dump = read_dump(path)
        >>> dump.step, dump.batch
        (9, {'ids': tensor([0, 1, 2]), 'scale': 2.0})
    """
    tensors, structure = _flatten(batch)
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _save(path, "batch", step, tensors, {"structure": structure}, random)
    except OSError as error:
        raise DumpError(f"{path}: cannot be written ({error}); give another place, or make room") from error
    return path


def read_dump(path: Path | str) -> Dump:
    """Reads what a `Dumper` or `save_batch` wrote, onto the CPU.

    Raises:
        DumpError: the file is missing, damaged, or no dump of ours.
    """
    path = Path(path)
    try:
        regular_size(path)
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # not a mapping
    except (SafetensorError, OSError, UntrustedError) as error:
        raise DumpError(f"{path}: is missing, cut short, damaged or no safetensors file ({error})") from error
    if header.get("format") != _FORMAT:
        raise DumpError(f"{path}: is no dump of ottava's (format {header.get('format')!r}, needs {_FORMAT!r})")
    random = {n.removeprefix("random."): tensors.pop(n) for n in list(tensors) if n.startswith("random.")}
    try:
        kind = header["kind"]
        if kind not in _KINDS:
            raise DumpError(f"{path}: {unknown_name('kind', kind, _KINDS)}")
        return _contents(kind, path, int(header["step"]), parse_json(header["facts"]), tensors, random)
    except DumpError:
        raise
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise DumpError(f"{path}: its header does not fit its tensors ({error!r}); the file is damaged") from error


def _contents(
    kind: str,
    path: Path,
    step: int,
    facts: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    random: Mapping[str, Tensor],
) -> Dump:
    if kind == "batch":
        return BatchDump(path, step, _unflatten(facts["structure"], tensors), random)
    if kind == "gemms":
        recipe = Recipe.from_dict(facts["recipe"])
        return GemmDump(path, step, facts["layer"], recipe, tensors["x"], tensors["w"], tensors["dy"], random)
    x_q = None
    if "codes" in tensors:
        dtype, spec = (
            getattr(torch, facts["dtype"].removeprefix("torch.")),
            QuantizationSpec.from_dict(dict(facts["spec"])),
        )
        x_q = QuantizedTensor(tensors["codes"], tensors["scale_inv"], spec, dtype)
    return TensorDump(path, step, SlotKey(**facts["key"]), tensors["x"], tensors.get("rows"), x_q, random)


def _save(
    path: Path,
    kind: str,
    step: int,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    random: Mapping[str, Tensor] | None,
) -> int:
    """Writes beside the place and renames; returns the size."""
    states = random_states() if random is None else random
    # memory of its own for each: safetensors refuses tensors that share it
    contents = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    contents |= {f"random.{device}": state.cpu().clone() for device, state in states.items()}
    header = {"format": _FORMAT, "kind": kind, "step": str(step), "facts": json.dumps(facts)}
    with replacing(path) as scratch:
        try:
            save_file(contents, scratch, metadata=header)
        except SafetensorError as error:
            raise OSError(f"{path}: {error}") from error
        return scratch.stat().st_size


def _short(name: str) -> str:
    """A safe file name for any name, of 200 bytes at most: file systems take 255."""
    safe = _UNSAFE.sub("_", name).encode()
    if len(safe) <= _NAME_BYTES:
        return safe.decode()
    return f"{safe[: _NAME_BYTES - 17].decode(errors='ignore')}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _spec(spec: QuantizationSpec) -> QuantizationSpec:
    """A function cannot be read back, and this cast is done: what the next scale would be does not matter."""
    return dataclasses.replace(spec, amax_compute_algo="max") if callable(spec.amax_compute_algo) else spec


def _maybe(spec: QuantizationSpec | None) -> QuantizationSpec | None:
    return None if spec is None else _spec(spec)


def _spread_rows(x: Tensor, rows: int) -> Tensor | None:
    """int64, ascending: that of the largest element, and others evenly spread; None for all of them."""
    if rows <= 0 or x.shape[0] <= rows:
        return None
    chosen = torch.linspace(0, x.shape[0] - 1, rows, dtype=torch.float64).round().long().tolist()
    largest = int(x.detach().abs().amax(dim=1).argmax())
    if largest not in chosen:
        chosen[min(range(rows), key=lambda i: abs(chosen[i] - largest))] = largest
    return torch.tensor(sorted(chosen))


def _flatten(batch: Any) -> tuple[dict[str, Tensor], Any]:
    """Tensors by name, and the nesting as JSON with their names in their places."""
    tensors: dict[str, Tensor] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors[name := f"batch.{len(tensors)}"] = value
            return {"tensor": name}
        if isinstance(value, Mapping):
            if not all(isinstance(key, str) for key in value):
                raise DumpError("save_batch: a dict with keys that are no strings; give it strings")
            return {"dict": {key: walk(item) for key, item in value.items()}}
        if isinstance(value, (tuple, list)):
            return {"tuple" if isinstance(value, tuple) else "list": [walk(item) for item in value]}
        if isinstance(value, (str, int, float, bool, type(None))):
            return {"value": value}
        raise DumpError(
            f"save_batch: holds a {type(value).__name__}; needs tensors, numbers, strings and None in tuples, lists "
            "and dicts"
        )

    return tensors, walk(batch)


def _unflatten(structure: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    ((kind, value),) = structure.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: _unflatten(item, tensors) for key, item in value.items()}
    if kind in ("tuple", "list"):
        items = [_unflatten(item, tensors) for item in value]
        return tuple(items) if kind == "tuple" else items
    return value
