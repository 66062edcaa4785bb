"""The files of a watched run, and their names and columns.

    RUN/watch.json            versions, settings, layers, coverage, overhead      (rewritten while the run goes on)
    RUN/stats/part-RANK-K.parquet   a row per step x cast x rank: the fields of `Tally` and of `SlotKey`
    RUN/steps.jsonl           a line per optimizer step: step, and loss, grad_norm, lr, tokens, seconds if known; in the
                              folder of `ottava train`, what its metrics.jsonl does not have
    RUN/events.jsonl          a line per event: triggers, dumps, fallbacks, warnings
    RUN/training.jsonl        a line per look: the update of each parameter; and a line per mode of the forward
    RUN/experiments.jsonl     a line per experiment: what the watch tried, and what came out
    RUN/dumps/*.safetensors   dumped tensors
    RUN/ranks/RANK/           watch.json, steps.jsonl and training.jsonl of the other ranks; a run that `Run.open` reads

The files store sums that merge exactly, not statistics. Any tool reads them:

    duckdb:  SELECT layer, step, n_underflow / n_nonzero FROM 'RUN/stats/*.parquet' WHERE tensor = 'input'
    pandas:  pandas.read_parquet("RUN/stats")
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from ottava.base.untrusted import UntrustedError, misfit, parse_json, read_text
from ottava.measure.tally import tally_fields

if TYPE_CHECKING:
    from ottava.numerics.tensor import QuantizationSpec

SCHEMA_VERSION = 2
READABLE = (1, SCHEMA_VERSION)
"""Version 1 hashed batches in another way, and read the norm of the gradient after clipping; see `Run.steps`."""
MANIFEST, STEPS, EVENTS, STATS, DUMPS = "watch.json", "steps.jsonl", "events.jsonl", "stats", "dumps"
TRAINING, EXPERIMENTS, RANKS = "training.jsonl", "experiments.jsonl", "ranks"
TRAINER_MANIFEST, TRAINER_STEPS = "manifest.json", "metrics.jsonl"
"""Files of `ottava train` in the same folder."""
TRAINER_NUMBERS = frozenset({"loss", "grad_norm", "lr", "tokens", "seconds"})
"""Columns of its metrics.jsonl. It writes a number that is not finite as null, so steps.jsonl keeps those."""

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
"""The parts of watch.json that readers use, see `untrusted.misfit`. Parts may be missing; other parts are allowed."""


class SlotKey(NamedTuple):
    """One cast of one tensor of one layer: the key of a series of statistics."""

    layer: str
    """Full name of the layer."""
    tensor: str
    """One of SYMBOLS."""
    direction: str
    """"row": x as fprop (for grad_output: dgrad) contracts it; "col": x.T, if it has a cast of its own."""
    recipe: str
    """Name of the recipe."""
    format: str
    """Number format."""
    granularity: str
    """Block with one scale, as str(Granularity)."""
    scale_format: str
    """Format of the scales."""
    scaling: str
    """current, delayed or guarded."""
    source: str
    """"door": the operand of the GEMM itself. "config": cast as the layer's own package casts it, by the configuration
    that the layer carries. "hook": simulated beside a GEMM of any precision. "import:...": measured by another tool."""


def cast_key(layer: str, tensor: str, direction: str, recipe: str, spec: QuantizationSpec, source: str) -> SlotKey:
    """The key of a cast by a spec."""
    how = (spec.format.name, str(spec.granularity), spec.scale_format, spec.scaling)
    return SlotKey(layer, tensor, direction, recipe, *how, source)


IDENTITY = ("step", "rank", "phase", "kind", *SlotKey._fields)
"""Columns beside the fields of the tally. phase: "full" rows have all fields, "light" rows only amax and scale. kind:
part of a transformer, see `layer_names`."""
_HISTOGRAM_START = "exponents_first"
"""Bin of the first entry of `exponents`, which is stored without its empty ends."""
REPORTED = "reported"
"""Statistics that another tool computed, if it gave no sums: a map from names of STATISTICS."""


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
    """A run folder cannot be read or written; the message names the file, the reason, and what to do."""

    exit_code = 4


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads watch.json, the manifest of a run.

    Raises:
        RunError: the file is damaged, of another schema version, or does not fit `MANIFEST_SHAPE`.
    """
    try:
        facts = parse_json(read_text(path))
    except UntrustedError as error:
        raise RunError(f"{path}: is damaged: {error}") from error
    if not isinstance(facts, dict):
        raise RunError(f"{path}: is damaged: got {type(facts).__name__}, needs an object")
    version = facts.get("schema_version")
    if version not in READABLE:
        known = " and ".join(map(str, READABLE))
        raise RunError(f"{path}: has schema version {version}; this ottava reads {known}")
    if wrong := misfit(facts, MANIFEST_SHAPE, MANIFEST):
        raise RunError(f"{path}: {wrong}; somebody edited the file, or another program wrote it")
    return facts


def trainer_manifest(folder: Path) -> dict[str, Any]:
    """What watch.json would say of a run of `ottava train` that nobody watched: from its manifest.json and config.yaml.

    Raises:
        RunError: a file is damaged, or not what `ottava train` writes.
    """
    from ottava.base.settings import ConfigError, flatten, read_yaml
    from ottava.recipe import Recipe

    path = folder / TRAINER_MANIFEST
    try:
        facts = parse_json(read_text(path))
        config = flatten(read_yaml(folder / "config.yaml"))
        conversion = facts["conversion"]
        from ottava.recipe import Recipe  # a reader of runs needs no recipe

        recipe = Recipe.from_dict(conversion["recipe"])
        layers = [
            {"name": str(name), "source": "door", "seen": False, "shape": None, "recipe": recipe.for_layer(name).name}
            for name in conversion["converted"]
        ]
        about = {name: facts[name] for name in ("versions", "started")}
        command = shlex.split(facts["command"])
        host = {"device": facts["device"], "platform": facts["platform"]}
    except (UntrustedError, ConfigError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunError(f"{path}: is no manifest of `ottava train` ({error!r}); somebody edited the file") from error
    return {
        "schema_version": SCHEMA_VERSION,
        **about,
        "command": command,
        "host": host,
        "config": {name: value for name, value in config.items() if not name.startswith("watch")},
        "layers": layers,
        "recipes": {recipe.name: recipe.to_dict()},
        "cast": {"ran": bool(layers) and recipe.casts},
        "framework": ["ottava"],
        "ended": "closed" if (folder / "receipt.json").is_file() else "",
    }
