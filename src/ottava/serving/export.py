"""`export`: writes a checkpoint for an inference engine, with the codes that the trained forward multiplied.

The rule: codes are made of bf16(master) by the cast of the layout. Where a layer's own cast has the blocks of the
layout, its codes and scales are written as they are, so engine and trainer compute with one weight, bit for bit.
`ExportReport` says for each weight whether they do.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ottava.base.errors import need_known
from ottava.base.files import replacing_folder
from ottava.base.text import grouped, progress
from ottava.numerics.formats import E4M3
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.ops.quantize import quantize
from ottava.serving.engines import ENGINES, sharing
from ottava.serving.source import Source, Weight, of_folder, same_numbers
from ottava.weights.layouts import DEFAULT, LAYOUTS, Layout

REPORT = "export.json"
_ASKED = "kept in BF16 as asked"
_SHARD_BYTES = 5_000_000_000


class ExportError(ValueError):
    """A model cannot be exported in a layout; the message names the tensor and what to do."""

    exit_code = 2


@dataclass(frozen=True)
class Written:
    """One linear of the checkpoint."""

    name: str
    """Of the module."""
    cast: str
    """Format, blocks and scales; "bf16" if it stays in high precision."""
    why: str
    """Why it stays in high precision, or has other numbers than in training."""
    as_trained: bool | None
    """Whether its numbers are those that the trained forward multiplied; None: training did not cast it."""


@dataclass(frozen=True)
class ExportReport:
    """What `export` has written."""

    folder: str
    layout: str
    linears: tuple[Written, ...]
    nbytes: int
    bf16_bytes: int
    """Bytes of the same tensors in BF16."""

    @property
    def changed(self) -> list[str]:
        """Names of the linears whose numbers differ from those that the trained forward multiplied."""
        return [one.name for one in self.linears if one.as_trained is False]

    def __str__(self) -> str:
        low = sum(one.cast != "bf16" for one in self.linears)
        bits = "FP4" if self.layout in LAYOUTS and LAYOUTS[self.layout].packed else "FP8"
        text = f"{self.folder}: {self.layout}, {low} of {len(self.linears)} linears in {bits}, "
        text += f"{self.nbytes:,} bytes instead of {self.bf16_bytes:,} in BF16"
        said = {True: "as trained", False: "not as trained", None: "training did not cast it"}
        groups = grouped(((one.cast, one.as_trained, one.why), one.name) for one in self.linears)
        for (cast, as_trained, why), names in groups.items():
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            text += f"\n  {cast}, {said[as_trained]}{f' ({why})' if why else ''}: {shown}"
        return text


def export(
    model: nn.Module | Path | str | Source,
    folder: Path | str,
    *,
    layout: str | None = None,
    config: Mapping[str, Any] | None = None,
    static: bool = False,
    keep: Collection[str] = (),
    kv_scales: Mapping[str, tuple[float, float]] | None = None,
    shard_bytes: int = _SHARD_BYTES,
    recast: bool = False,
    engine: str | None = None,
) -> ExportReport:
    """Writes a checkpoint that transformers, vLLM, SGLang or TensorRT-LLM serve.

    Args:
        model: a model (converted by ottava or not), the folder of a BF16 checkpoint of Hugging Face's, or a `Source`.
        folder: a new or empty folder.
        layout: a name of `weights.layouts.LAYOUTS`. None: the first that holds the codes of the trained forward; for a
            model without casts compressed-tensors-block.
        config: the content of config.json; None: the model's own.
        static: write a scale of the activations of each linear, from histories of delayed scaling or of calibration.
            "modelopt" always needs them.
        keep: shell patterns of linears that stay in BF16.
        kv_scales: module name of an attention -> scales of its FP8 keys and values, see `kv_cache_scales`.
        shard_bytes: largest size of a file.
        recast: cast bf16(weight) as the layout does where it cannot hold the cast of the trained forward. Engines then
            multiply other numbers than training did, and the report says so. False: that is an error.
        engine: a name of `serving.engines.ENGINES`, which will serve it: what this engine does not read is an error.
            None: experts that transformers does not load are one.
    Returns:
        ExportReport; also written as export.json.
    Raises:
        ExportError: an unknown layout or engine, a folder that is not empty, a tensor that is not finite, a layout that
            does not hold the trained casts, or that the engine does not read, a history that lacks.
    Edge cases: q, k, v and gate, up go together, because engines join them: if one stays in BF16, all do, and per
        tensor they share a scale. Heads, routers and embeddings stay in BF16, tied weights are written once, and a
        weight that a block would cut stays in BF16: engines read the scales of cut blocks differently. The Conv1D of
        GPT-2 stays in BF16, too: engines cast nn.Linear only.

    Example:
        >>> import tempfile
        >>> from ottava.serving.source import Source, Weight
        >>> source = Source((Weight("up.weight", torch.randn(128, 256).bfloat16(), linear=True),), {})
        >>> with tempfile.TemporaryDirectory() as place:
        ...     report = export(source, f"{place}/out", layout="fp8-block")
        ...     print(sorted(path.name for path in Path(f"{place}/out").iterdir()), report.linears[0].cast)
        ['config.json', 'export.json', 'model.safetensors'] E4M3[128x128]
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ExportError(f"export: {folder} exists and is not empty; give a new folder")
    source, layout, tree, parts, written = written_tensors(
        model, layout=layout, config=config, static=static, keep=keep, kv_scales=kv_scales, recast=recast, engine=engine
    )
    with replacing_folder(folder) as scratch:
        nbytes = write_tensors(scratch, parts, shard_bytes)
        bf16 = sum(2 * math.prod(weight.shape) for weight in source.weights)
        report = ExportReport(str(folder), layout, tuple(written), nbytes, bf16)
        for path in source.files:
            shutil.copy2(path, scratch / path.name)
        (scratch / "config.json").write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
        for name, body in LAYOUTS[layout].beside(tree.get("quantization_config") or {}).items():
            (scratch / name).write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
        (scratch / REPORT).write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    return report


def written_tensors(
    model: nn.Module | Path | str | Source,
    *,
    layout: str | None = None,
    config: Mapping[str, Any] | None = None,
    static: bool = False,
    keep: Collection[str] = (),
    kv_scales: Mapping[str, tuple[float, float]] | None = None,
    recast: bool = False,
    engine: str | None = None,
) -> tuple[Source, str, dict[str, Any], Iterator[dict[str, Tensor]], list[Written]]:
    """What `export` writes, a weight at a time, and nothing of it before it is read. Arguments are those of `export`.

    Returns:
        The source, the layout, the content of config.json, and parts: a weight with its scales at a time. Last what was
        made of each linear; it fills while the parts are read.
    Raises:
        ExportError: as `export`, at once; a tensor that is not finite when it is reached.
    """
    need_known("export", "layout", layout, (None, *LAYOUTS), ExportError)
    need_known("export", "engine", engine, (None, *ENGINES), ExportError)
    if isinstance(model, (str, Path)):
        source = of_folder(Path(model))
    elif isinstance(model, Source):
        source = model
    else:
        from ottava.serving.trained import of_model  # it imports all modules; a checkpoint needs none

        source = of_model(model, config)
    if config is not None:
        source = Source(source.weights, dict(config), source.files)
    form = LAYOUTS[layout or _fitting(source, engine, recast=recast)]
    static = static or form.static
    stays = _staying(source, form, keep)
    if not recast and (changes := _changes(source, form, stays)):
        raise ExportError(_refusal(changes, form, source))
    scales = _input_scales(source, stays) if static and form.spec is not None else {}
    more = {f"{module}.input_scale": torch.tensor([scale]) for module, scale in scales.items()}
    for module, pair in (kv_scales or {}).items():
        if not all(scale > 0 for scale in pair):
            raise ExportError(f"export: kv_scales of {module} are {pair}; needs two positive numbers")
        more |= {f"{module}.{kind}_scale": torch.tensor([s]) for kind, s in zip("kv", pair, strict=True)}
    tree = _config(source, form, stays, engine, static=static, kv_cache=bool(kv_scales))
    written: list[Written] = []
    parts = chain(_cast_all(source, form, stays, written), ({name: one} for name, one in more.items()))
    return source, form.name, tree, map(_finite, parts), written


def _config(
    source: Source, form: Layout, stays: Mapping[str, str], engine: str | None, *, static: bool, kv_cache: bool
) -> dict[str, Any]:
    """The content of config.json."""
    tree = dict(source.config)
    if "dtype" in tree or "torch_dtype" in tree:  # what is written is BF16, whatever the masters were
        tree.pop("torch_dtype", None)
        tree["dtype"] = "bfloat16"
    if form.spec is None:
        return tree
    linears = [weight.module for weight in source.weights if weight.linear]
    kept = [name for name in linears if name in stays]
    if tree.get("tie_word_embeddings") and "lm_head" not in linears:
        kept.append("lm_head")  # it has no tensor, and who reads this list would expect codes of it
    tree["quantization_config"] = form.config(ignored=kept, static=static, kv_cache=kv_cache)
    names = [name for name in linears if name not in stays]
    if reason := _unread(form, tree, engine, names):
        alike = [one.name for one in LAYOUTS.values() if one.spec == form.spec]
        read = [name for name in alike if not _unread(LAYOUTS[name], tree, engine, names)] or ["bf16"]
        more = ", or name the engine that serves it (engine='vllm')" if engine is None else ""
        raise ExportError(f"export: layout {form.name!r}: {reason}. Take layout {' or '.join(map(repr, read))}{more}")
    return tree


def _fitting(source: Source, engine: str | None, *, recast: bool) -> str:
    """The first layout that holds a trained cast, and that is read; without casts that with the default's blocks."""
    names, refused = [weight.module for weight in source.weights if weight.linear], ""
    readable = [form for form in LAYOUTS.values() if form.spec and not _unread(form, source.config, engine, names)]
    for weight in source.weights:
        if not weight.stays and (cast := weight.cast) is not None:
            if fitting := [form.name for form in readable if form.holds(cast.spec)]:
                return fitting[0]
            refused = refused or _not_held(weight.module, cast.spec, None)
    if refused and not recast:
        raise ExportError(refused)
    return next((form.name for form in readable if form.spec == LAYOUTS[DEFAULT].spec), DEFAULT)


def _changes(source: Source, form: Layout, stays: Mapping[str, str]) -> dict[str, str]:
    """Module -> why an engine would multiply it by another recipe than training did, unasked."""
    found: dict[str, str] = {}
    if form.spec is None:
        return found
    for group in _groups([weight for weight in source.weights if weight.linear]):
        casts = {weight.module: cast for weight in group if (cast := weight.cast) is not None}
        held = {name: cast for name, cast in casts.items() if name not in stays and form.holds(cast.spec)}
        for name, cast in casts.items():
            if name in stays and stays[name] != _ASKED:
                found[name] = f"trained as {cast.spec}, would stay in BF16: {stays[name]}"
            elif name not in stays and name not in held:
                found[name] = f"trained as {cast.spec}"
        if form.shares_scale and len(held) == len(group) > 1 and form.common(list(held.values())) is None:
            found |= dict.fromkeys(held, "engines join it with others to one scale, where training had one for each")
    return found


def _refusal(changes: Mapping[str, str], form: Layout, source: Source) -> str:
    """The sentence about all weights that would change; each is named."""
    first = next(iter(changes))
    cast = next(weight.cast for weight in source.weights if weight.module == first)
    groups = grouped((why, name) for name, why in changes.items())
    named = "".join(f"\n  {why}: {', '.join(names)}" for why, names in groups.items())
    if cast is not None and not form.holds(cast.spec):
        return _not_held(first, cast.spec, form) + ". Nothing is written; these weights would change:" + named
    return (
        f"export: layout {form.name!r} would change the recipe of {len(changes)} weights. Give recast=True (--recast) "
        f"to write them so, or take another layout. Nothing is written:{named}"
    )


def _not_held(module: str, spec: QuantizationSpec, form: Layout | None) -> str:
    """The sentence about a trained cast that a layout does not hold."""
    others = [one.name for one in LAYOUTS.values() if one.holds(spec)]
    held = "no layout holds that" if form is None or not others else f"layout {form.name!r} holds {form.spec}"
    take = f"Take layout {' or '.join(map(repr, others or ['bf16']))}"
    return (
        f"export: training multiplied {module} as {spec}, and {held}. {take}, or give recast=True (--recast) to cast "
        "the weights anew, to other numbers than training had"
    )


def _unread(form: Layout, config: Mapping[str, Any], engine: str | None, names: Sequence[str]) -> str:
    """Why an engine does not read these linears in a layout; without a name only experts count, in transformers."""
    reader = ENGINES[engine or "transformers"]
    if engine is None and form.method not in reader.rules:
        return ""
    experts = any(".experts." in name for name in names)
    return reader.unread(form.config(static=form.static), str(config.get("model_type", "")), experts=experts)


def _staying(source: Source, form: Layout, keep: Collection[str]) -> dict[str, str]:
    """Module -> why its linear stays in BF16; the parts of a fused linear go together."""
    linears = [weight for weight in source.weights if weight.linear]
    for pattern in keep:
        if not any(fnmatchcase(weight.module, pattern) for weight in linears):
            names = ", ".join(weight.module for weight in linears[:6])
            raise ExportError(f"export: keep={pattern!r} matches no linear; they are {names}, ...")
    stays: dict[str, str] = {}
    for weight in linears:
        if form.spec is None:
            stays[weight.module] = ""
        elif any(fnmatchcase(weight.module, pattern) for pattern in keep):
            stays[weight.module] = _ASKED
        elif weight.stays:
            stays[weight.module] = weight.stays
        elif not form.fits(_shape(weight)):
            stays[weight.module] = f"{_shape(weight)} has no whole blocks of {form.spec.granularity}"
    for group in _groups(linears):
        first = next((w.module for w in group if w.module in stays), None)
        if first is not None:
            for weight in group:
                stays.setdefault(weight.module, f"engines join it with {first}, which stays in BF16")
    if form.spec is not None and len(stays) == len(linears):
        reasons = "; ".join(dict.fromkeys(stays.values())) or "it has no linear"
        raise ExportError(
            f"export: layout {form.name!r} leaves every weight in BF16: {reasons}. Take 'bf16' or another layout"
        )
    return stays


def _groups(linears: Sequence[Weight]) -> list[list[Weight]]:
    """The linears that engines join, group by group; the others alone."""
    weights = {weight.module: weight for weight in linears}
    return [[weights[name] for name in group] for group in sharing(weights)]


def _shape(weight: Weight) -> tuple[int, int]:
    return weight.shape[0], weight.shape[1]


def _input_scales(source: Source, stays: Mapping[str, str]) -> dict[str, float]:
    scales: dict[str, float] = {}
    quantized = [weight for weight in source.weights if weight.linear and weight.module not in stays]
    missing = [weight.module for weight in quantized if weight.input_scale_inv is None]
    if missing:
        raise ExportError(
            f"export: {missing[0]} and {len(missing) - 1} more have no history of their input, and this layout needs a "
            "scale of it. Convert with recipe 'delayed', run ottava.calibrate(model, batches) until every layer has "
            "run, and export again"
        )
    for group in _groups(quantized):  # one input, one scale
        top = max(weight.input_scale_inv or 0.0 for weight in group)
        scales |= {weight.module: top for weight in group}
    return scales


def _cast_all(
    source: Source, form: Layout, stays: Mapping[str, str], written: list[Written]
) -> Iterator[dict[str, Tensor]]:
    """The tensors of the checkpoint, a weight with its scales at a time, so that few are in memory; and its report."""
    groups = {
        id(group[0]): group for group in _groups([w for w in source.weights if w.linear and w.module not in stays])
    }
    later = {id(weight) for group in groups.values() for weight in group[1:]}
    for weight in progress(sorted(source.weights, key=_natural), "writing weights"):
        if not weight.linear or weight.module in stays:
            tensor, trained = weight.tensor, weight.cast
            plain = _own(tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor)
            if weight.linear:
                same = None if trained is None else torch.equal(plain.float(), trained.dequantize(torch.float32).cpu())
                written.append(Written(weight.module, "bf16", stays[weight.module], same))
            yield {weight.name: plain}
        elif id(weight) not in later:
            yield from _cast_group(groups[id(weight)], form, written)


def _cast_group(group: Sequence[Weight], form: Layout, written: list[Written]) -> Iterator[dict[str, Tensor]]:
    own = [weight.cast for weight in group]
    casts = _casts(group, own, form)
    common = form.common(casts) if form.shares_scale else None
    for weight, trained, cast in zip(group, own, casts, strict=True):
        same = None if trained is None else same_numbers(cast, trained)
        why = _difference(group, trained, form) if same is False and trained is not None else ""
        written.append(Written(weight.module, str(cast.spec), why, same))
        yield {f"{weight.module}.{key}": _own(tensor) for key, tensor in form.tensors(cast, common).items()}


def _difference(group: Sequence[Weight], trained: QuantizedTensor, form: Layout) -> str:
    """Why an engine multiplies other numbers than the trained forward."""
    if not form.holds(trained.spec):
        return f"trained as {trained.spec}; the layout holds {form.spec}"
    names = ", ".join(weight.module.rpartition(".")[2] for weight in group)
    return f"engines join {names}: one scale for all, where training had one for each"


def _casts(group: Sequence[Weight], own: Sequence[QuantizedTensor | None], form: Layout) -> list[QuantizedTensor]:
    """The trained casts where the layout holds them; others anew, under one scale where engines want one."""
    assert form.spec is not None
    # also where codes are ready: they do not show an infinity
    values = [x.to(torch.bfloat16) for weight in group for x in _finite({weight.name: weight.tensor}).values()]
    fitting = [cast for cast in own if cast is not None and form.holds(cast.spec)]
    if not form.shares_scale or len(group) == 1:
        return [quantize(x, form.spec) if cast is None or not form.holds(cast.spec) else cast
                for x, cast in zip(values, own, strict=True)]  # fmt: skip
    if len(fitting) == len(group) and form.common(fitting) is not None:
        return fitting
    specs = {cast.spec for cast in fitting}
    alike = specs.pop() if len(fitting) == len(group) and len(specs) == 1 else form.spec
    for spec in (replace(alike, scaling="current"), form.spec):
        whole, starts = quantize(torch.cat(values), spec), accumulate((len(x) for x in values), initial=0)
        parts = [whole.part(0, start, start + len(x)) for x, start in zip(values, starts, strict=False)]
        cut = [part for part in parts if part is not None]
        if len(cut) == len(group):
            break
    return cut


def _finite(part: dict[str, Tensor]) -> dict[str, Tensor]:
    """The part; refuses what is not finite: codes, scales, and all that stays in high precision."""
    for name, tensor in part.items():
        if tensor.is_floating_point() and not bool(tensor.to(torch.bfloat16).isfinite().all()):
            raise ExportError(f"export: {name} holds an infinity or NaN; find it with ottava.watch before serving it")
    return part


def _own(tensor: Tensor) -> Tensor:
    """Contiguous, on the CPU, and alone in its memory: safetensors writes no views of one storage."""
    tensor = tensor.cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def write_tensors(folder: Path, parts: Iterable[dict[str, Tensor]], most: int) -> int:
    """Writes files of at most `most` bytes, and their index if there are several; returns the bytes of all tensors.

    A part stays in one file: a scale with its codes.
    """
    from safetensors.torch import save_file

    places: dict[str, int] = {}
    total = count = 0
    for count, shard in enumerate(_shards(parts, most), start=1):
        save_file(shard, folder / f"{count}.safetensors", metadata={"format": "pt"})
        places |= dict.fromkeys(shard, count)
        total += sum(tensor.nbytes for tensor in shard.values())
        shard.clear()  # before the next one is read
    names = {
        i: f"model-{i:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors" for i in places.values()
    }
    for number, name in names.items():
        (folder / f"{number}.safetensors").rename(folder / name)
    if count > 1:
        weight_map = {key: names[place] for key, place in places.items()}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return total


def _shards(parts: Iterable[dict[str, Tensor]], most: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for part in parts:
        nbytes = sum(tensor.nbytes for tensor in part.values())
        if shard and size + nbytes > most:
            yield shard
            shard, size = {}, 0
        shard |= part
        size += nbytes
    yield shard


def _natural(weight: Weight) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (math.inf, part) for part in weight.name.split(".")]  # type: ignore[misc]


def kv_cache_scales(model: nn.Module, batches: Sequence[Mapping[str, Tensor]]) -> dict[str, tuple[float, float]]:
    """Scales for an FP8 cache of keys and values: amax / 448 of each layer over some batches.

    Args:
        model: of Hugging Face's; its forward gives past_key_values.
        batches: arguments of its forward, such as {"input_ids": ids}.
    Returns:
        Module name of each attention -> (scale of keys, scale of values); both dequantize.
    Raises:
        ExportError: the model gives no cache, or has other attention modules than layers in it.
    """
    tops: list[tuple[float, float]] = []
    training = model.training
    model.eval()
    try:
        for batch in batches:
            with torch.no_grad():
                cache = getattr(model(**batch, use_cache=True), "past_key_values", None)
            layers = getattr(cache, "layers", None)
            if not layers:
                raise ExportError(f"kv_cache_scales: {type(model).__name__} gives no past_key_values")
            seen = [(float(layer.keys.abs().amax()), float(layer.values.abs().amax())) for layer in layers]
            tops = [(max(a, c), max(b, d)) for (a, b), (c, d) in zip(tops or seen, seen, strict=True)]
    finally:
        model.train(training)
    names = [name for name, module in model.named_modules() if name.endswith(("self_attn", "attention", "attn"))
             and any(hasattr(module, part) for part in ("k_proj", "qkv_proj"))]  # fmt: skip
    if len(names) != len(tops):
        raise ExportError(f"kv_cache_scales: found {len(names)} attention modules and {len(tops)} layers of the cache")
    return {
        name: (max(k, 1e-12) / E4M3.max, max(v, 1e-12) / E4M3.max) for name, (k, v) in zip(names, tops, strict=True)
    }
