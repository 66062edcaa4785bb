"""Writes tensors to safetensors files and reads them back: no pickle, and any safetensors reader can open them.

    tensor   `codes` (raw, one per byte), `scale_inv`, `x` before the cast (all of it, or some rows with their `rows`)
    gemms    `x` (M, K), `w` (N, K), `dy` (M, N) of one layer: the operands of its three GEMMs before any cast
    batch    `batch.0`, `batch.1`, ... and their nesting

Each file also has `random.<device>`, the states of torch's generators at that moment. The header describes the tensors
as JSON. A file is whole or missing, because it is written under another name and renamed.
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

from ottava.base.errors import need_known
from ottava.base.files import replacing
from ottava.base.untrusted import UntrustedError, parse_json, regular_size
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.recipe import GEMMS, Recipe
from ottava.record.random_state import random_states
from ottava.record.schema import SlotKey
from ottava.record.writer import RunWriter

_FORMAT = "ottava.debug.dump/1"
_KINDS = ("tensor", "gemms", "batch")
_HEADER_BYTES = 4096
_NAME_BYTES = 200
_UNSAFE = re.compile(r"[^\w.-]")


class DumpError(ValueError):
    """A dump cannot be written or read; the message names the file, the reason, and what to do."""

    exit_code = 4


@dataclass(frozen=True, eq=False)
class TensorDump:
    """One cast of one tensor."""

    path: Path
    step: int
    key: SlotKey
    """Layer, tensor, direction and recipe of the cast."""
    x: Tensor
    """The tensor before the cast: (R, C), or only its `rows`."""
    rows: Tensor | None
    """int64: numbers of the rows in x; None for all rows."""
    x_q: QuantizedTensor | None
    """The whole cast; None if the tensor was not cast."""
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
    """Recipe of the layer, with its overrides applied."""
    x: Tensor
    """(M, K)"""
    w: Tensor
    """(N, K)"""
    dy: Tensor
    """(M, N)"""
    random: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class BatchDump:
    """The batch of a step."""

    path: Path
    step: int
    batch: Any
    """Tensors in the original tuples, lists and dicts."""
    random: Mapping[str, Tensor]
    """States of torch's generators before the forward."""


Dump = TensorDump | GemmDump | BatchDump


class Dumper:
    """Writes dumps into a run folder up to a quota. It warns once when the quota is used up and skips later dumps; a
    patient writer does the same on a full disk.

    Args:
        writer: the run's writer. The first dump makes its folder of dumps.
        quota_bytes: size of all files in that folder, with those of other ranks and earlier starts.
        rows: rows of x to write beside the codes, evenly spread, with the row of the largest element; 0 for all rows.

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
        """Dumps beyond the quota."""

    def dump(self, step: int, key: SlotKey, x: Tensor, x_q: QuantizedTensor | None) -> Path | None:
        """Writes one cast: x (R, C) before it, x_q after it. Returns None beyond the quota."""
        rows = _spread_rows(x, self.rows)
        tensors = {"x": x if rows is None else x[rows.to(x.device)]}
        facts: dict[str, Any] = {"key": key._asdict()}
        if rows is not None:
            tensors["rows"] = rows
        if x_q is not None:
            tensors |= {"codes": x_q.data, "scale_inv": x_q.scale_inv}
            facts |= {"spec": _readable(x_q.spec).to_dict(), "dtype": str(x_q.dtype)}
        return self._write("tensor", step, (key.layer, key.tensor, key.direction, key.recipe), tensors, facts)

    def dump_gemms(self, step: int, layer: str, recipe: Recipe, x: Tensor, w: Tensor, dy: Tensor) -> Path | None:
        """Writes the operands of a layer's GEMMs: x (M, K), w (N, K), dy (M, N). None beyond the quota."""
        cells = {gemm: getattr(recipe, gemm) for gemm in GEMMS}
        for gemm, operands in cells.items():
            lhs, rhs = (spec and _readable(spec) for spec in (operands.lhs, operands.rhs))
            cells[gemm] = dataclasses.replace(operands, lhs=lhs, rhs=rhs)
        tensors = {"x": x, "w": w, "dy": dy}
        facts = {"layer": layer, "recipe": dataclasses.replace(recipe, overrides=(), **cells).to_dict()}
        return self._write("gemms", step, (layer, "gemms"), tensors, facts)

    def _write(
        self, kind: str, step: int, place: tuple[str, ...], tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
    ) -> Path | None:
        """place: layer, tensor, and what else the name of the file needs."""
        folder, name = self.writer.dumps, ".".join(place)
        size = sum(tensor.nbytes for tensor in tensors.values()) + _HEADER_BYTES
        with self.writer.attempt(step, loses="dumps"):
            folder.mkdir(parents=True, exist_ok=True)
            used = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            if used + size <= self.quota_bytes:
                path = folder / f"{_short(f'step-{step:06d}.rank-{self.writer.rank}.{name}')}.safetensors"
                nbytes = _save(path, tensors, None, kind=kind, step=str(step), facts=json.dumps(facts))
                self.writer.event(step, "dump", file=path.name, layer=place[0], tensor=place[1], nbytes=nbytes)
                return path
            if not self.refused:
                text = (
                    f"no more dumps: {name} needs {size:,} bytes, but {used:,} of the quota of {self.quota_bytes:,} "
                    "are used; raise dump.quota_gb, lower dump.rows, or move old dumps away"
                )
                self.writer.event(step, "warning", text=text)
            self.refused += 1
        return None


def save_batch(path: Path | str, batch: Any, random: Mapping[str, Tensor] | None = None, step: int = 0) -> Path:
    """Writes a batch to a file.

    Args:
        batch: a tensor, or tensors, numbers, strings and None in tuples, lists and dicts.
        random: states of torch's generators before the forward; None: the present states.
    Raises:
        DumpError: the batch has values of other types, or the file cannot be written.

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
        facts = json.dumps({"structure": structure})
        _save(path, tensors, random, kind="batch", step=str(step), facts=facts)
    except OSError as error:
        raise DumpError(f"{path}: cannot be written ({error}); give another path, or make room on the disk") from error
    return path


def read_dump(path: Path | str) -> Dump:
    """Reads a dump of `Dumper` or `save_batch`, onto the CPU.

    Raises:
        DumpError: the file is missing, damaged, or no dump of ottava.

    Example: see `save_batch`.
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
        raise DumpError(f"{path}: is no dump of ottava: its format is {header.get('format')!r}; needs {_FORMAT!r}")
    random = {n.removeprefix("random."): tensors.pop(n) for n in list(tensors) if n.startswith("random.")}
    try:
        kind = header["kind"]
        need_known(path, "kind", kind, _KINDS, DumpError)
        step, facts = int(header["step"]), parse_json(header["facts"])
        if kind == "batch":
            return BatchDump(path, step, _unflatten(facts["structure"], tensors), random)
        if kind == "gemms":
            recipe = Recipe.from_dict(facts["recipe"])
            return GemmDump(path, step, facts["layer"], recipe, tensors["x"], tensors["w"], tensors["dy"], random)
        x_q = None
        if "codes" in tensors:
            spec = QuantizationSpec.from_dict(dict(facts["spec"]))
            dtype = getattr(torch, facts["dtype"].removeprefix("torch."))
            x_q = QuantizedTensor(tensors["codes"], tensors["scale_inv"], spec, dtype)
        return TensorDump(path, step, SlotKey(**facts["key"]), tensors["x"], tensors.get("rows"), x_q, random)
    except DumpError:
        raise
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise DumpError(f"{path}: its header does not fit its tensors ({error!r}); the file is damaged") from error


def _save(path: Path, tensors: Mapping[str, Tensor], random: Mapping[str, Tensor] | None, **header: str) -> int:
    """Writes a scratch file and renames it; returns its size."""
    states = random_states() if random is None else random
    # clones, because safetensors refuses tensors that share memory
    contents = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    contents |= {f"random.{device}": state.cpu().clone() for device, state in states.items()}
    with replacing(path) as scratch:
        save_file(contents, scratch, metadata={"format": _FORMAT, **header})
        return scratch.stat().st_size


def _short(name: str) -> str:
    """A safe file name of at most 200 bytes for any name; file systems allow 255."""
    safe = _UNSAFE.sub("_", name).encode()
    if len(safe) <= _NAME_BYTES:
        return safe.decode()
    return f"{safe[: _NAME_BYTES - 17].decode(errors='ignore')}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _readable(spec: QuantizationSpec) -> QuantizationSpec:
    """Replaces a function by "max": a file cannot hold a function, and the dump needs no next scale."""
    return dataclasses.replace(spec, amax_compute_algo="max") if callable(spec.amax_compute_algo) else spec


def _spread_rows(x: Tensor, rows: int) -> Tensor | None:
    """int64, ascending: evenly spread rows with the row of the largest element; None for all rows."""
    if rows <= 0 or x.shape[0] <= rows:
        return None
    chosen = torch.linspace(0, x.shape[0] - 1, rows, dtype=torch.float64).round().long().tolist()
    largest = int(x.detach().abs().amax(dim=1).argmax())
    if largest not in chosen:
        chosen[min(range(rows), key=lambda i: abs(chosen[i] - largest))] = largest
    return torch.tensor(sorted(chosen))


def _flatten(batch: Any) -> tuple[dict[str, Tensor], Any]:
    """Tensors by name, and the nesting as JSON with these names."""
    tensors: dict[str, Tensor] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors[name := f"batch.{len(tensors)}"] = value
            return {"tensor": name}
        if isinstance(value, Mapping):
            if not all(isinstance(key, str) for key in value):
                raise DumpError("save_batch: got a dict with keys that are no strings; needs strings as keys")
            return {"dict": {key: walk(item) for key, item in value.items()}}
        if isinstance(value, (tuple, list)):
            return {"tuple" if isinstance(value, tuple) else "list": [walk(item) for item in value]}
        if isinstance(value, (str, int, float, bool, type(None))):
            return {"value": value}
        raise DumpError(
            f"save_batch: got a {type(value).__name__}; needs tensors, numbers, strings and None in tuples, lists "
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
