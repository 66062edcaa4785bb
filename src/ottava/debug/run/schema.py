"""What a watched run leaves on disk, and the words in it.

    RUN/watch.json            versions, settings, layers, coverage, overhead      (rewritten as the run goes on)
    RUN/stats/part-RANK-K.parquet   a row per step x cast x rank: the fields of `Tally` and of `SlotKey`
    RUN/steps.jsonl           a line per optimizer step: step, and what is known of loss, grad_norm, lr, tokens, seconds
    RUN/events.jsonl          a line per event: triggers, dumps, fallbacks, warnings
    RUN/dumps/*.safetensors   dumped tensors

Statistics are stored as sums that merge exactly, never as finished numbers. Any tool reads them:

    duckdb:  SELECT layer, step, n_underflow / n_nonzero FROM 'RUN/stats/*.parquet' WHERE tensor = 'input'
    pandas:  pandas.read_parquet("RUN/stats")
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa

from ottava.debug.tally import tally_fields
from ottava.quantized_tensor import QuantizationSpec
from ottava.untrusted import UntrustedError, misfit, parse_json, read_text

SCHEMA_VERSION = 1
MANIFEST, STEPS, EVENTS, STATS, DUMPS = "watch.json", "steps.jsonl", "events.jsonl", "stats", "dumps"

MANIFEST_SHAPE: Mapping[str, Any] = MappingProxyType(
    {
        "versions": dict,
        "host": dict,
        "config": dict,
        "settings": {"recipes": [str]},
        "layers": [{"shape": [int], "recipe": str}],
        "coverage": {"linear": int, "seen": int, "skipped": [dict]},
        "overhead": {"share": float},
    }
)
"""What readers of watch.json rely on, see `untrusted.misfit`: all of it may be missing, and there may be more."""

SYMBOLS = MappingProxyType(
    {
        "input": "X",
        "weight": "W",
        "grad_output": "dY",
        "output": "Y",
        "grad_input": "dX",
        "grad_weight": "dW",
        "qkv": "QKV",
        "s": "S",
        "o": "O",
        "do": "dO",
        "dp": "dP",
        "dqkv": "dQKV",
    }
)
"""How papers write the tensors of y = x @ w.T and of attention; both are understood where a user names one."""


def symbol(tensor: str, direction: str = "row") -> str:
    """A tensor as papers write it; what nobody knows stays.

    Example:
        >>> symbol("input"), symbol("weight", "col"), symbol("bias")
        ('X', 'W.T', 'bias')
    """
    return SYMBOLS.get(tensor, tensor) + (".T" if direction == "col" else "")


class SlotKey(NamedTuple):
    """One cast of one tensor of one layer: what a series of statistics belongs to."""

    layer: str
    """Full name of the layer."""
    tensor: str
    """One of SYMBOLS."""
    direction: str
    """"row": x as fprop (dgrad for grad_output) contracts it; "col": x.T, where that is cast on its own."""
    recipe: str
    """Name of the recipe whose cast this is."""
    format: str
    """Number format."""
    granularity: str
    """Block that shares a scale, as str(Granularity)."""
    scale_format: str
    """How precise a scale is."""
    scaling: str
    """current, delayed or guarded."""
    source: str
    """"door": the operand that the GEMM got. "hook": simulated beside a GEMM of whatever precision. "import:...":
    another tool measured it."""


def cast_key(layer: str, tensor: str, direction: str, recipe: str, spec: QuantizationSpec, source: str) -> SlotKey:
    """The key of a cast by a spec."""
    how = (spec.format.name, str(spec.granularity), spec.scale_format, spec.scaling)
    return SlotKey(layer, tensor, direction, recipe, *how, source)


IDENTITY = ("step", "rank", "phase", "kind", *SlotKey._fields)
"""Columns beside those of the tally. phase: "full" has all of them; "light" has only amax and the scale. kind: which
part of a transformer the layer is, see `layer_names`."""
_HISTOGRAM_START = "exponents_first"
"""Bin of the first entry of `exponents`, whose empty ends are not stored."""
REPORTED = "reported"
"""Finished numbers where another tool gave no sums: a map from names of STATISTICS."""


def stats_schema() -> pa.Schema:
    """Columns of stats/*.parquet."""
    columns = [pa.field("step", pa.int64()), pa.field("rank", pa.int32())]
    columns += [pa.field(name, pa.dictionary(pa.int32(), pa.string())) for name in IDENTITY[2:]]
    for f in tally_fields("number"):
        columns.append(pa.field(f.name, pa.int64() if f.name.startswith("n_") or f.name == "n" else pa.float64()))
    for f in tally_fields("histogram"):
        counts = not f.name.startswith("energy")
        columns.append(pa.field(f.name, pa.list_(pa.int64() if counts else pa.float64())))
    columns.append(pa.field(_HISTOGRAM_START, pa.int32()))
    columns.append(pa.field(REPORTED, pa.map_(pa.string(), pa.float64())))
    return pa.schema(columns, metadata={"ottava_schema_version": str(SCHEMA_VERSION)})


class RunError(ValueError):
    """A run folder cannot be read or written; the message names the file, why, and what to do."""

    exit_code = 4


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a run, from its watch.json.

    Raises:
        RunError: it is damaged, of another schema version, or holds something else than readers rely on.
    """
    try:
        facts = parse_json(read_text(path))
    except UntrustedError as error:
        raise RunError(f"{path}: is damaged: {error}") from error
    if not isinstance(facts, dict):
        raise RunError(f"{path}: is damaged: {type(facts).__name__} instead of an object")
    if facts.get("schema_version") != SCHEMA_VERSION:
        raise RunError(f"{path}: schema version {facts.get('schema_version')}; this ottava reads {SCHEMA_VERSION}")
    if wrong := misfit(facts, MANIFEST_SHAPE, MANIFEST):
        raise RunError(f"{path}: {wrong}; the file was changed, or written by something else")
    return facts
