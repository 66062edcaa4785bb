"""`export`: writes a checkpoint for an inference engine, with the codes that the trained forward multiplied.

The rule: codes are made of bf16(master) by the cast of the layout. Where a layer's own cast has the blocks of the
layout, its codes and scales are written as they are, so engine and trainer compute with one weight, bit for bit.
`ExportReport` says for each weight whether they do.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ottava.casts import quantize
from ottava.errors import unknown_name
from ottava.formats import E4M3
from ottava.quantized_tensor import QuantizedTensor
from ottava.serving.layouts import DEFAULT, LAYOUTS, Facts, Layout
from ottava.serving.source import Source, Weight, copy_files, of_folder, of_model

REPORT = "export.json"
_SHARD_BYTES = 5_000_000_000
_FUSED = re.compile(r"(?P<place>.*)\.(?:(?P<qkv>[qkv]_proj)|(?P<gate_up>gate_proj|up_proj|w1|w3))$")
"""Linears that engines join into one: they need one precision, and per tensor one scale."""


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
    """Why it stays in high precision, or has other codes than in training."""
    as_trained: bool | None
    """Whether codes and scales are those that the trained forward multiplied; None: it had no cast."""


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
        """Names of the linears whose codes or scales differ from those of the trained forward."""
        return [one.name for one in self.linears if one.as_trained is False]

    def __str__(self) -> str:
        quantized = [one for one in self.linears if one.cast != "bf16"]
        known = [one for one in quantized if one.as_trained is not None]
        text = f"{self.folder}: {self.layout}, {len(quantized)} of {len(self.linears)} linears in FP8, "
        text += f"{self.nbytes:,} bytes instead of {self.bf16_bytes:,} in BF16"
        if known:
            text += f"; {len(known) - len(self.changed)} of {len(known)} have the codes of the trained forward"
        reasons: dict[str, list[str]] = {}
        for one in self.linears:
            if one.why:
                reasons.setdefault(one.why, []).append(one.name)
        for why, names in reasons.items():
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            text += f"\n  {shown}: {why}"
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
) -> ExportReport:
    """Writes a checkpoint that transformers, vLLM, SGLang or TensorRT-LLM serve.

    Args:
        model: a model (converted by ottava or not), the folder of a BF16 checkpoint of Hugging Face's, or a `Source`.
        folder: a new or empty folder.
        layout: a name of `serving.layouts.LAYOUTS`. None: the first that holds the codes of the trained forward; for a
            model without casts compressed-tensors-block.
        config: the content of config.json; None: the model's own.
        static: write a scale of the activations of each linear, from histories of delayed scaling or of calibration.
            "modelopt" always needs them.
        keep: shell patterns of linears that stay in BF16.
        kv_scales: module name of an attention -> scales of its FP8 keys and values, see `kv_cache_scales`.
        shard_bytes: largest size of a file.
    Returns:
        ExportReport; also written as export.json.
    Raises:
        ExportError: an unknown layout, a folder that is not empty, weights that are not finite, a history that lacks.
    Edge cases: q, k, v and gate, up go together, because engines join them: if one stays in BF16, all do, and per
        tensor they share a scale. Heads, routers and embeddings stay in BF16, tied weights are written once, and a
        weight that a block would cut stays in BF16: engines read the scales of cut blocks differently.

    Example:
        >>> import tempfile
        >>> from ottava.serving.source import Source, Weight
        >>> source = Source((Weight("up.weight", torch.randn(128, 256).bfloat16(), linear=True),), {})
        >>> with tempfile.TemporaryDirectory() as place:
        ...     report = export(source, f"{place}/out", layout="fp8-block")
        ...     print(sorted(path.name for path in Path(f"{place}/out").iterdir()), report.linears[0].cast)
        ['config.json', 'export.json', 'model.safetensors'] E4M3[128x128]
    """
    if layout is not None and layout not in LAYOUTS:
        raise ExportError(f"export: {unknown_name('layout', layout, LAYOUTS)}")
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ExportError(f"export: {folder} exists and is not empty; give a new folder")
    if isinstance(model, (str, Path)):
        source = of_folder(Path(model))
    else:
        source = model if isinstance(model, Source) else of_model(model, config)
    if config is not None:
        source = Source(source.weights, dict(config), source.files)
    form = LAYOUTS[layout or _fitting(source)]
    static = static or form.static
    stays = _staying(source, form, keep)
    scales = _input_scales(source, stays) if static and form.spec is not None else {}
    more = {f"{module}.input_scale": torch.tensor([scale]) for module, scale in scales.items()}
    for module, pair in (kv_scales or {}).items():
        more |= {f"{module}.{kind}_scale": torch.tensor([s]) for kind, s in zip("kv", pair, strict=True)}
    linears = [weight.module for weight in source.weights if weight.linear]
    if form.spec is not None and len(stays) == len(linears):
        reasons = "; ".join(dict.fromkeys(stays.values())) or "it has no linear"
        raise ExportError(f"export: layout {form.name!r} leaves every weight in BF16: {reasons}. Take another layout")
    facts = Facts(ignored=[name for name in linears if name in stays], static=static, kv_cache=bool(kv_scales))
    tree = dict(source.config)
    if form.config is not None:
        tree["quantization_config"] = form.config(facts)
    written: list[Written] = []
    with beside(folder) as scratch:
        parts = chain(_cast_all(source, form, stays, written), ({name: one} for name, one in more.items()))
        nbytes = write_tensors(scratch, parts, shard_bytes)
        bf16 = sum(2 * math.prod(weight.shape) for weight in source.weights)
        report = ExportReport(str(folder), form.name, tuple(written), nbytes, bf16)
        _write_texts(scratch, source, tree, report)
    return report


def _fitting(source: Source) -> str:
    casts = [weight for weight in source.weights if weight.codes is not None]
    forms = (form for form in LAYOUTS.values() if form.spec is not None)
    return next((form.name for form in forms if any(_fits(weight.cast, form) for weight in casts)), DEFAULT)


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
            stays[weight.module] = "kept in BF16 as asked"
        elif weight.stays:
            stays[weight.module] = weight.stays
        elif not form.fits(_shape(weight)):
            stays[weight.module] = f"{_shape(weight)} has no whole blocks of {form.spec.granularity}"
    for group in _groups(linears):
        first = next((w.module for w in group if w.module in stays), None)
        if first is not None:
            for weight in group:
                stays.setdefault(weight.module, f"engines join it with {first}, which stays in BF16")
    return stays


def _groups(linears: Sequence[Weight]) -> Iterator[list[Weight]]:
    """The linears that engines join, group by group; the others alone."""
    groups: dict[tuple[str, str], list[Weight]] = {}
    for weight in linears:
        match = _FUSED.fullmatch(weight.module)
        kind = "" if match is None else "qkv" if match["qkv"] else "gate_up"
        groups.setdefault((weight.module if match is None else match["place"], kind), []).append(weight)
    yield from groups.values()


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
    for weight in _in_order(source.weights):
        if not weight.linear or weight.module in stays:
            if weight.linear:
                written.append(Written(weight.module, "bf16", stays[weight.module], None))
            yield {weight.name: _plain(weight.tensor)}
        elif id(weight) not in later:
            yield from _cast_group(groups[id(weight)], form, written)


def _cast_group(group: Sequence[Weight], form: Layout, written: list[Written]) -> Iterator[dict[str, Tensor]]:
    for weight, cast in zip(group, _casts(group, form), strict=True):
        trained = weight.cast
        same = None if trained is None else _equal(cast, trained)
        why = _difference(group, trained, form) if same is False and trained is not None else ""
        written.append(Written(weight.module, str(form.spec), why, same))
        scales = form.stored_scale(cast.scale_inv.cpu()).clone()
        yield {weight.name: _own(cast.data), f"{weight.module}.{form.scale_key}": scales}


def _difference(group: Sequence[Weight], trained: QuantizedTensor, form: Layout) -> str:
    """Why an engine multiplies other codes than the trained forward."""
    if not _fits(trained, form):
        return f"trained as {trained.spec}; the layout holds {form.spec}"
    names = ", ".join(weight.module.rpartition(".")[2] for weight in group)
    return f"engines join {names}: one scale for all, where training had one for each"


def _casts(group: Sequence[Weight], form: Layout) -> list[QuantizedTensor]:
    spec = form.spec
    assert spec is not None
    own = [weight.cast for weight in group]
    fitting = [cast for cast in own if cast is not None and _fits(cast, form)]
    alike = not form.shares_scale or len({float(cast.scale_inv) for cast in fitting}) == 1
    if len(fitting) == len(group) and alike:
        return fitting
    values = [_bf16(weight) for weight in group]
    if not form.shares_scale or len(group) == 1:
        return [quantize(x, spec) if cast is None or form.shares_scale or not _fits(cast, form) else cast
                for x, cast in zip(values, own, strict=True)]  # fmt: skip
    amax = torch.stack([x.float().abs().amax() for x in values]).amax().reshape(1, 1)
    scale = spec.scale_of(amax).scale.reshape(())
    return [quantize(x, spec, scale=scale) for x in values]


def _fits(cast: QuantizedTensor | None, form: Layout) -> bool:
    """Whether a layout can hold this cast as it is."""
    spec = form.spec
    assert spec is not None
    if cast is None:
        return False
    powers = form.scale_dtype == "fp32" or cast.spec.scale_format in ("pow2", "e8m0", "e8m0_floor")
    return cast.spec.format == spec.format and cast.spec.granularity == spec.granularity and powers


def _equal(cast: QuantizedTensor, trained: QuantizedTensor) -> bool:
    return (
        cast.scale_inv.shape == trained.scale_inv.shape
        and torch.equal(cast.scale_inv.cpu(), trained.scale_inv.cpu())
        and torch.equal(cast.data.cpu().view(torch.uint8), trained.data.cpu().view(torch.uint8))
    )


def _bf16(weight: Weight) -> Tensor:
    x = weight.tensor.to(torch.bfloat16)
    if not bool(x.isfinite().all()):
        raise ExportError(
            f"export: {weight.name} holds an infinity or NaN; find it with ottava.watch before serving it"
        )
    return x


def _plain(tensor: Tensor) -> Tensor:
    return _own(tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor)


def _own(tensor: Tensor) -> Tensor:
    """Contiguous, on the CPU, and alone in its memory: safetensors writes no views of one storage."""
    tensor = tensor.cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


@contextmanager
def beside(folder: Path) -> Iterator[Path]:
    """A folder beside its place; renamed if the block ends well, removed if not."""
    scratch = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
        if folder.is_dir():
            folder.rmdir()
        scratch.rename(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


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


def _write_texts(folder: Path, source: Source, config: dict[str, Any], report: ExportReport) -> None:
    copy_files(source, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if report.layout == "modelopt":
        own = config["quantization_config"]
        about = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8" if own["kv_cache_scheme"] else None}
        about["exclude_modules"] = own["ignore"]
        body = {"producer": {"name": "ottava"}, "quantization": about}
        (folder / "hf_quant_config.json").write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
    (folder / REPORT).write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")


def _in_order(weights: Iterable[Weight]) -> list[Weight]:
    return sorted(weights, key=lambda one: _natural(one.name))


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (math.inf, part) for part in name.split(".")]  # type: ignore[misc]


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
    return {name: (_scale(k), _scale(v)) for name, (k, v) in zip(names, tops, strict=True)}


def _scale(amax: float) -> float:
    return max(amax, 1e-12) / E4M3.max
