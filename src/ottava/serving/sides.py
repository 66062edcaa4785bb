"""What multiplies in each linear, of training and in an engine that reads a checkpoint."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ottava.base.errors import need_known
from ottava.base.settings import flatten
from ottava.base.untrusted import UntrustedError, file_digest
from ottava.numerics.formats import E2M1, E4M3, E5M2, Format
from ottava.numerics.rounding import round_to_format
from ottava.numerics.scaling import (
    BLOCK_1X16,
    BLOCK_1X32,
    BLOCK_1X128,
    PER_ROW,
    PER_TENSOR,
    Granularity,
    ScaleFormat,
    amax,
)
from ottava.numerics.tensor import QuantizationSpec, QuantizedTensor
from ottava.ops.quantize import quantize
from ottava.recipe import Recipe
from ottava.serving.engines import ENGINES, EXACT, Arithmetic, Decision, InferenceEngine, decide, sharing, units
from ottava.serving.source import Source, Weight, is_linear, turned_names
from ottava.weights.layouts import (
    INPUT_KEYS,
    SCALE_KEYS,
    Group,
    InputCast,
    Quantization,
    open_tensors,
    read_config,
    read_quantization,
)
from ottava.weights.parameter import powers_only

_POWERS = ("pow2", "e8m0", "e8m0_floor")
_CODES = MappingProxyType({torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, torch.uint8: E2M1})


@dataclass(frozen=True, eq=False)
class Side:
    """One linear on one side."""

    weight: Tensor
    """In high precision; of codes what they decode to."""
    cast: QuantizedTensor | None = None
    """What is multiplied, if not bf16(weight)."""
    activations: InputCast | None = None
    """None: they stay in high precision."""
    layer: str = ""
    """Its layer in training."""
    codes: bool = False
    """Whether the checkpoint stores codes for it."""
    arithmetic: Arithmetic = EXACT
    misfit: str = ""
    """Why the blocks of the config are not those of the stored scales."""
    stored: QuantizedTensor | None = None
    """The cast in the file, where the engine rounds its scales anew."""
    inputs: QuantizationSpec | None = None
    """The cast of its input; None: that of `activations` and the weight's format."""
    scales: Callable[[Tensor], Tensor] | None = None
    """What a kernel makes of the scales of its input; None: what was written."""

    def operand(self) -> Tensor:
        """fp32 (N, K): the numbers that are multiplied. BF16, or what codes and scales stand for."""
        if self.cast is None:
            return self.weight.bfloat16().float()
        if self.arithmetic.weights != "bf16-scales":
            exact = self.cast.dequantize(torch.float32)
            return exact if self.arithmetic.weights == "codes" else exact.bfloat16().float()
        rounded = replace(self.cast, scale_inv=self.cast.scale_inv.bfloat16().float())
        return rounded.dequantize(torch.float32).bfloat16().float()

    def rows(self, x: Tensor) -> Tensor:
        """x (T, K) -> fp32 (T, K): what is multiplied for this input."""
        cast, near = self.activations, x.bfloat16()
        if cast is None or self.cast is None or self.arithmetic.inputs == "none":
            return near.float()
        if self.arithmetic.inputs == "bf16":
            return _in_bf16(near, cast, self.cast.spec.format)
        scale = torch.tensor(1 / cast.scale_inv) if cast.static and cast.scale_inv and not self.inputs else None
        given = near if cast.rounded else x
        made = quantize(given, self.inputs or spec_of(cast, self.cast.spec), scale=scale)
        if self.scales is not None:
            made = replace(made, scale_inv=self.scales(made.scale_inv).contiguous())
        return made.dequantize(torch.float32)

    def holding(self, weight: Tensor) -> Side:
        """The same with another weight, cast as this one is by the numbers that it has now."""
        cast = None if self.cast is None else quantize(weight, replace(self.cast.spec, scaling="current"))
        return replace(self, weight=weight, cast=cast)

    @property
    def digest(self) -> str:
        """A hash of the numbers that are multiplied."""
        return digest(self.operand() + 0.0)  # -0 is 0

    def __str__(self) -> str:
        if self.cast is None:
            return "codes read as numbers" if self.codes else "BF16"
        return f"{self.cast.spec.format.name}[{self.cast.spec.granularity}]"


@dataclass(frozen=True, eq=False)
class Model:
    """Everything that multiplies, on one side."""

    linears: Mapping[str, Side]
    """By the name of the module in the checkpoint."""
    plain: Mapping[str, Tensor]
    """Other tensors, by name."""
    config: Mapping[str, Any]
    tied: bool
    """Whether the head is the embedding."""
    decisions: Mapping[str, Decision] = field(default_factory=dict)
    """Of the engine."""
    kv_cache: bool = False
    """Whether keys and values are cached in FP8."""
    unread: str = ""
    """Why the engine reads none of it."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the files."""

    @property
    def casts(self) -> dict[str, Side]:
        """The linears that are cast."""
        return {name: side for name, side in self.linears.items() if side.cast is not None}


def digest(*tensors: Tensor) -> str:
    """SHA-256 of "torch.DTYPE (SHAPE)" and then the bytes in row-major order, tensor by tensor; others can compute it.

    Example:
        >>> digest(torch.tensor([1.0])) == hashlib.sha256(b"torch.float32 (1,)" + bytes([0, 0, 128, 63])).hexdigest()
        True
    """
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _in_bf16(x: Tensor, cast: InputCast, fmt: Format) -> Tensor:
    """x bf16 (T, K) -> fp32 (T, K), with scale, quotient and product in BF16, as compressed-tensors 0.20 has them.

    Its scales of MX formats come from amax rounded to two bits of mantissa, for all of them: 1.75 and more is 2.
    """
    size, shape = cast.granularity, (x.shape[0], x.shape[1])
    if cast.static and cast.scale_inv is not None:
        scale = torch.tensor(cast.scale_inv).bfloat16()
    else:
        top = amax(x, size)
        if cast.powers:
            mantissa, exponent = torch.frexp(top.float())
            scale = torch.exp2(exponent - 1 + (mantissa >= 1.75 / 2).int() - math.floor(math.log2(fmt.max))).bfloat16()
        else:
            scale = top.bfloat16() / torch.tensor(fmt.max).bfloat16()
        scale = torch.where(top == 0, torch.finfo(torch.bfloat16).eps, scale.float()).bfloat16()
        scale = size.expand(scale, shape)
    codes = round_to_format((x / scale).float().clamp(-fmt.max, fmt.max), fmt)
    return (codes.bfloat16() * scale).float()


def trained(source: Source) -> Model:
    """The side of training."""
    linears: dict[str, Side] = {}
    for weight in source.weights:
        if weight.linear:
            spec = weight.input_spec if weight.cast is not None else None
            linears[weight.module] = Side(weight.tensor, weight.cast, _cast_of(spec, weight), weight.layer)
        elif is_linear(weight.name, weight.shape):  # a router that no nn.Linear holds
            linears[weight.module] = Side(weight.tensor)
    held = {f"{name}.weight" for name in linears}  # a bias of a linear is a tensor of its own
    plain = {weight.name: weight.tensor for weight in source.weights if weight.name not in held}
    tied = "lm_head" not in linears and "lm_head.weight" not in plain
    return Model(linears, plain, source.config, tied)


def _cast_of(spec: QuantizationSpec | None, weight: Weight) -> InputCast | None:
    if spec is None:
        return None
    known = weight.input_scale_inv if spec.predicted else None
    stored = None if known is None else torch.tensor(known, dtype=torch.float32).item()
    return InputCast(spec.granularity, spec.scale_format in _POWERS, spec.predicted, stored)


def under(source: Source, recipe: Recipe) -> Source:
    """A checkpoint in high precision as a training under a recipe casts it, by its linears' names.

    Example:
        >>> from ottava.recipe import RECIPES
        >>> plain = Source((Weight("up.weight", torch.randn(64, 64).bfloat16(), True),), {})
        >>> str(under(plain, RECIPES["rowwise"]).weights[0].cast.spec)
        'E4M3[row, pow2]'
    """

    def one(weight: Weight) -> Weight:
        if not weight.linear or weight.stays:
            return weight
        own = recipe.for_layer(weight.module)
        if (spec := own.fprop.rhs) is None:
            return weight
        cast = quantize(weight.tensor, replace(spec, scaling="current"))
        return replace(weight, codes=cast, input_spec=own.fprop.lhs, layer=weight.module)

    return replace(source, weights=tuple(one(weight) for weight in source.weights))


def served(folder: Path, engine: str, settings: Mapping[str, Any] | None = None, *, device: str | None = None) -> Model:
    """The side of an engine that reads a checkpoint.

    Args:
        engine: a name of `engines.ENGINES`.
        settings: of the engine, in its own words and nesting; environment variables under "env".
        device: "cpu" or "cuda", on which it multiplies. None: `default_device`.
    Raises:
        UntrustedError: the folder is damaged.  ValueError: an unknown engine.
    """
    need_known("parity", "engine", engine, ENGINES)
    reader = ENGINES[engine]
    device = device or default_device(engine)
    words = _words(reader, settings or {}, device)
    try:
        config = read_config(folder)
        found = config.get("quantization_config") or {}
        with ExitStack() as files:
            tensors = {name: file.get_tensor(name) for name, file in sorted(open_tensors(folder, files).items())}
    except (UntrustedError, OSError) as error:
        raise UntrustedError(f"parity: {folder} cannot be read: {error}") from error
    tied = bool(config.get("tie_word_embeddings", False)) or "lm_head.weight" not in tensors
    weights = {name.removesuffix(".weight"): t for name, t in tensors.items() if is_linear(name, t.shape)}
    names = [name for name in weights if not (tied and name == "lm_head")]
    model_type = str(config.get("model_type", ""))
    unread = reader.unread(found, model_type)
    rule = None if unread else reader.rules.get(str(found.get("quant_method", "")).lower())
    quantization = None if rule is None else read_quantization(found)
    how = [reader.multiplies(found, device, expert=expert) for expert in (False, True)]
    decisions = {name: Decision(False) for name in names} if rule is None else decide(rule, found, names)
    turned = turned_names({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    for name in (name for name in names if name.rpartition(".")[2] in turned):
        decisions[name] = Decision(False, "", f"{engine} casts nn.Linear only, and it is a Conv1D, which holds W.T")
    method = "" if quantization is None else quantization.method
    decisions |= {name: Decision(False, "", never) for name in names if (never := reader.leaves(name, method))}
    if any(".experts." in name and decisions[name].quantized for name in names):
        unread = reader.unread(found, model_type, experts=True)
    linears = {
        n: replace(
            _side(n, weights[n], tensors, decisions[n], quantization, reader, words), arithmetic=how[".experts." in n]
        )
        for n in names
    }
    if rule is not None and rule.partly != "apart":
        linears = _rejoined(linears)
    used = {f"{n}.{key}" for n in names for key in ("weight", *SCALE_KEYS, *INPUT_KEYS)}
    used |= {name for name in tensors if name.endswith(("k_scale", "v_scale"))}
    cached = quantization is not None and quantization.kv_cache
    return Model(
        linears,
        {name: tensor for name, tensor in tensors.items() if name not in used},
        config,
        tied,
        decisions,
        cached or "fp8" in str(words.get("kv_cache_dtype", "")),
        unread,
        files={
            path.name: file_digest(path)
            for path in sorted(folder.iterdir())
            if path.suffix in (".safetensors", ".json")
        },
    )


def default_device(engine: str) -> str:
    """Where an engine multiplies if nobody says so: transformers on what this machine has, the others on a GPU."""
    return "cpu" if engine == "transformers" and not torch.cuda.is_available() else "cuda"


def _words(engine: InferenceEngine, settings: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Settings of an engine in our words; of two for one word, what switches it off holds."""
    given = flatten(settings)
    found: dict[str, Any] = dict(engine.on_gpus) if device == "cuda" else {}
    for path, word in engine.settings.items():
        if path in given and (word not in engine.on_gpus or _truth(found.get(word))):
            found[word] = given[path]
    return found


def _side(
    name: str,
    weight: Tensor,
    tensors: Mapping[str, Tensor],
    decision: Decision,
    quantization: Quantization | None,
    engine: InferenceEngine,
    words: Mapping[str, Any],
) -> Side:
    """A linear as the engine multiplies it, before it joins any."""
    group = None if quantization is None else quantization.group_of(name) or quantization.groups[0]
    fmt = _CODES.get(weight.dtype)
    if fmt is None or group is None:
        wanted = decision.quantized and group is not None
        return Side(
            weight if fmt is None else weight.float(),
            activations=_activations(name, tensors, group, engine, words) if wanted and group is not None else None,
            codes=fmt is not None,
        )
    stored = next((tensors[f"{name}.{key}"] for key in SCALE_KEYS if f"{name}.{key}" in tensors), None)
    if stored is None:
        return Side(weight.float(), codes=True)
    scale_inv = stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored
    cast = _decoded(weight, scale_inv.to(torch.float32), fmt, group.blocks)
    if not decision.quantized:  # the engine loads the codes as numbers
        return Side(weight.float(), codes=True)
    activations = _activations(name, tensors, group, engine, words)
    misfit, stored_cast, grid = "", None, group.blocks.grid_shape((weight.shape[0], weight.shape[1]))
    if tuple(cast.scale_inv.shape) != grid:
        misfit = f"blocks of {group.blocks} need a grid {grid} of scales, and {tuple(cast.scale_inv.shape)} is stored"
    wants_powers = _truth(words.get("ue8m0"))
    if wants_powers and cast.spec.granularity.rows == 128 and not powers_only(cast.scale_inv):
        stored_cast = cast
        cast = quantize(cast.dequantize(torch.float32), replace(cast.spec, scale_format="pow2"))
    return Side(cast.dequantize(torch.float32), cast, activations, codes=True, misfit=misfit, stored=stored_cast)


def _truth(value: Any) -> bool:
    return str(value).lower() in ("1", "true", "on", "yes")


def _decoded(codes: Tensor, scale_inv: Tensor, fmt: Format, size: Granularity) -> QuantizedTensor:
    """Codes and scales by the blocks of the config; a grid of another shape stays as it is stored, and is compared."""
    grid = size.grid_shape((codes.shape[0], codes.shape[1]))
    kind: ScaleFormat = "e8m0" if size == BLOCK_1X32 else "fp32"
    if [n for n in scale_inv.shape if n > 1] == [n for n in grid if n > 1]:
        scale_inv = scale_inv.reshape(grid)
    else:
        # blocks as an engine concludes from the shape of the scales
        rows, cols = (scale_inv.shape[0], scale_inv.shape[1]) if scale_inv.ndim == 2 else (scale_inv.numel(), 1)
        size = Granularity(-(-codes.shape[0] // max(rows, 1)), -(-codes.shape[1] // max(cols, 1)))
    return QuantizedTensor(codes, scale_inv, QuantizationSpec(fmt, size, kind), torch.bfloat16)


def _activations(
    name: str, tensors: Mapping[str, Tensor], group: Group, engine: InferenceEngine, words: Mapping[str, Any]
) -> InputCast | None:
    """How the engine casts the input of a linear."""
    if (cast := group.inputs) is None:
        return None
    size, powers = cast.granularity, cast.powers or _truth(words.get("ue8m0"))
    if size == PER_TENSOR and not cast.static and engine.tensor_dynamic is not None:
        size = engine.tensor_dynamic
    if size == PER_ROW and engine.whole and re.fullmatch(engine.whole, name):
        size = PER_TENSOR
    stored = next((tensors[f"{name}.{key}"] for key in INPUT_KEYS if f"{name}.{key}" in tensors), None)
    scale_inv = float(stored.float().max()) if cast.static and stored is not None and stored.numel() else None
    fused = _truth(words.get("fuse_act_quant")) and name.rpartition(".")[2] in ("down_proj", "w2", "fc2")
    return InputCast(size, powers and size in (BLOCK_1X128, BLOCK_1X32), cast.static, scale_inv, not fused)


def _rejoined(linears: Mapping[str, Side]) -> dict[str, Side]:
    """Linears after an engine has joined them: with one scale a tensor the largest one holds for all, and the codes of
    the others are rounded a second time."""
    made = dict(linears)
    for parts in units(linears).values():
        casts = [linears[part].cast for part in parts]
        if len(parts) == 1 or any(cast is None or cast.spec.granularity != PER_TENSOR for cast in casts):
            continue
        for group in sharing(parts):
            top = max(float(linears[part].cast.scale_inv) for part in group)  # type: ignore[union-attr]
            for part in group:
                cast = linears[part].cast
                assert cast is not None
                if float(cast.scale_inv) != top:
                    scale = torch.tensor(top).reciprocal()
                    again = quantize(
                        cast.dequantize(torch.float32), replace(cast.spec, scale_format="fp32"), scale=scale
                    )
                    again = replace(again, scale_inv=torch.tensor([[top]]))
                    made[part] = replace(linears[part], weight=again.dequantize(torch.float32), cast=again)
    return made


SAMPLE = (
    "A trainer and an inference engine that quantize other layers, other values or other layouts compute other things, "
    "in silence. This text is short, and the same for every certificate: it shows which layer hurts, not how much."
)
"""A text for models that read bytes."""


@dataclass(frozen=True, eq=False)
class Text:
    """Tokens for a measurement."""

    ids: Tensor
    """int64 (T,)."""
    said: str
    """What they are, for the certificate."""


def made_up(vocabulary: int, length: int = 128) -> Text:
    """Tokens without a tokenizer: always the same ones, drawn evenly."""
    drawn = torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(0))
    return Text(drawn, f"{length} tokens drawn evenly from the vocabulary (no tokenizer was read)")


def spec_of(cast: InputCast, weight: QuantizationSpec) -> QuantizationSpec:
    """The spec by which activations are cast in front of a weight of this spec."""
    powers = "e8m0" if weight.scale_format in ("e8m0", "e8m0_floor") else "pow2"
    numbers = "e4m3" if weight.scale_format == "e4m3" and cast.granularity == BLOCK_1X16 else "fp32"
    fmt = E4M3 if weight.format == E5M2 else weight.format  # no engine casts inputs to E5M2
    return QuantizationSpec(fmt, cast.granularity, powers if cast.powers else numbers)  # type: ignore[arg-type]
