"""The trainer's model as a Hugging Face Llama, for inference engines, and such a Llama as the trainer's model.

Both have the same formula. A Llama has separate projections, and here its tokens are bytes. `open_view` opens one side
of `ottava parity`: a run or such a checkpoint, optionally under a recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ottava.base.untrusted import UntrustedError, regular_size
from ottava.engine.functional import QuantizedLayer, quantized_layers
from ottava.nn.convert import convert, put_weight
from ottava.numerics.scaling import PER_TENSOR
from ottava.numerics.tensor import QuantizedTensor
from ottava.recipe import Recipe, default_filter, get_recipe
from ottava.serving.answers import (
    ENGINE,
    View,
    blocks_of,
    bytes_only,
    decode_bytes,
    encode_bytes,
    engine_recipe,
    named,
    of_hugging_face,
)
from ottava.serving.source import Source, Weight, of_folder
from ottava.serving.trained import cast_of, input_scale_of, numbers
from ottava.train.checkpoint import (
    Checkpoint,
    CheckpointError,
    fitting,
    high_precision_weights,
    restore_weights,
    whole_checkpoint,
)
from ottava.train.config import DataConfig, ModelConfig, TrainConfig, load_config
from ottava.train.data import ByteCorpus, DataError
from ottava.train.model import VOCABULARY, ByteTransformer, store
from ottava.weights.checkpoint import dequantize_state_dict, keep_in_state_dict
from ottava.weights.layouts import open_tensors
from ottava.weights.parameter import QuantizedWeight, store_scales


def of_run(source: Path) -> Source:
    """Reads a checkpoint of `ottava train`, with the casts of its last step.

    Args:
        source: the folder of a run (its newest checkpoint), or one checkpoint of RUN/checkpoints.

    Raises:
        CheckpointError: the folder holds no run, or its checkpoint does not fit its settings.
    """
    model, config, checkpoint = model_of_run(source)
    return as_llama(model, config.model, config.sequence_length, masters=high_precision_weights(checkpoint))


def model_of_run(source: Path) -> tuple[ByteTransformer, TrainConfig, Checkpoint]:
    """The model of a run, or of one of its checkpoints, with the weights and histories of its last step.

    Raises:
        CheckpointError: the folder holds no run, or its checkpoint does not fit its settings.
    """
    settings = run_of(source) / "config.yaml"
    if not settings.is_file():
        raise CheckpointError(f"{source}: has no config.yaml, so it is no run of `ottava train`")
    config = load_config(settings)
    checkpoint = whole_checkpoint(source)
    with torch.random.fork_rng(devices=[]):
        model = ByteTransformer(config.model, config.sequence_length)
    store(model, config.build_recipe(), config.optimizer)
    with fitting(checkpoint.path):
        model.load_state_dict(checkpoint.part("model."))
    return model, config, checkpoint


def run_of(source: Path) -> Path:
    """The run folder of a checkpoint in RUN/checkpoints; any other path is returned as it is."""
    return source.parent.parent if source.parent.name == "checkpoints" else source


def as_llama(
    model: ByteTransformer, config: ModelConfig, sequence_length: int, masters: Mapping[str, Tensor] | None = None
) -> Source:
    """A checkpoint of `LlamaForCausalLM` with the weights of a trained model. Its tokens are bytes.

    Args:
        masters: name -> parameter in high precision, for parameters that the model stores in fewer bits.

    Example:
        >>> source = as_llama(ByteTransformer(ModelConfig(), sequence_length=64), ModelConfig(), 64)
        >>> [weight.name for weight in source.weights][:3]
        ['model.embed_tokens.weight', 'model.layers.0.input_layernorm.weight', 'model.layers.0.self_attn.q_proj.weight']
    """
    if config.experts:
        raise CheckpointError("this run has experts (model.experts); export writes the layers of a Llama only")
    layers = dict(model.named_modules())
    casts = any(layer.resolved.quantized for layer in quantized_layers(model))
    parameters = dict(model.named_parameters()) | dict(masters or {})

    weights = []
    for ours, theirs in table(config):
        if ours.rpartition(".")[2] in ("embedding", "norm"):
            weights += [Weight(f"{name}.weight", numbers(parameters[f"{ours}.weight"]).detach()) for name in theirs]
        elif ours == "lm_head":
            values = numbers(parameters["lm_head.weight"]).detach()
            weights.append(Weight("lm_head.weight", values, True, default_filter("lm_head", model.lm_head) or ""))
        else:
            weights += _pieces(layers[ours], numbers(parameters[f"{ours}.weight"]).detach(), theirs, casts=casts)
    return Source(tuple(weights), _config(config, sequence_length))


def table(config: ModelConfig) -> list[tuple[str, dict[str, int]]]:
    """Each module of the trainer's model -> the Llama modules that hold its rows, with their numbers of rows.

    Example:
        >>> table(ModelConfig())[1]
        ('layers.0.attention.qkv_proj.norm', {'model.layers.0.input_layernorm': 128})
    """
    d, head = config.d_model, config.d_model // config.heads
    rows = [("embedding", {"model.embed_tokens": VOCABULARY})]
    for i in range(config.layers):
        here, there = f"layers.{i}", f"model.layers.{i}"
        q, kv = config.heads * head, config.kv_heads * head
        attn, mlp = f"{there}.self_attn", f"{there}.mlp"
        rows += [
            (f"{here}.attention.qkv_proj.norm", {f"{there}.input_layernorm": d}),
            (f"{here}.attention.qkv_proj", {f"{attn}.q_proj": q, f"{attn}.k_proj": kv, f"{attn}.v_proj": kv}),
            (f"{here}.attention.o_proj", {f"{attn}.o_proj": d}),
            (f"{here}.mlp.gate_up_proj.norm", {f"{there}.post_attention_layernorm": d}),
            (f"{here}.mlp.gate_up_proj", {f"{mlp}.gate_proj": config.ffn, f"{mlp}.up_proj": config.ffn}),
            (f"{here}.mlp.down_proj", {f"{mlp}.down_proj": d}),
        ]
    return [*rows, ("norm", {"model.norm": d}), ("lm_head", {"lm_head": VOCABULARY})]


def _pieces(layer: nn.Module, whole: Tensor, sizes: Mapping[str, int], *, casts: bool) -> list[Weight]:
    """Splits the rows of one fused layer into the linears that it holds."""
    cast = cast_of(layer) if isinstance(layer, QuantizedLayer) else None
    facts: tuple[Any, ...] = ()
    if isinstance(layer, QuantizedLayer):
        facts = input_scale_of(layer), layer.resolved.fprop.lhs, layer.name
    stays = "" if cast is not None or not casts else "its recipe does not cast it"
    weights, start = [], 0
    for name, size in sizes.items():
        piece = None if cast is None else cast.part(0, start, start + size)
        weights.append(Weight(f"{name}.weight", whole[start : start + size], True, stays, piece, *facts))
        start += size
    return weights


def _config(config: ModelConfig, sequence_length: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": config.d_model,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.d_model // config.heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": sequence_length,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "bfloat16",
    }


# --- from a Llama ----------------------------------------------------------------------------------------------------

_FIXED: Mapping[str, Any] = MappingProxyType(
    {"model_type": "llama", "vocab_size": VOCABULARY, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    | {"rope_scaling": None}
)
"""Keys of config.json, and the one value that the trainer's model has."""


_LARGEST = 1 << 20
"""Size that a config.json may claim: both tables of so many positions take 1 GiB for heads of 128."""


def is_weights(path: Path) -> bool:
    """Whether a path is a folder of weights alone: of Hugging Face's, or what `ottava consolidate` writes."""
    names = ("model.safetensors", "model.safetensors.index.json", "config.json")
    return path.is_dir() and any((path / name).is_file() for name in names)


def settings_of(config: Mapping[str, Any], folder: Path) -> tuple[ModelConfig, int]:
    """The trainer's settings of a Llama's config.json: the model, and the longest sequence.

    Raises:
        CheckpointError: the trainer's model has another formula; the message names the key.
    """
    rope = config.get("rope_parameters") or {}
    found = {**config, "rope_scaling": config.get("rope_scaling")}
    if isinstance(rope, dict) and rope.get("rope_type", "default") != "default":
        found["rope_scaling"] = rope["rope_type"]
    for key, wanted in _FIXED.items():
        if found.get(key, wanted) != wanted:
            raise CheckpointError(
                f"{folder}: {key} is {found[key]!r}, and the model of `ottava train` has {wanted!r}. Train this one in "
                "your own loop: ottava.load_fp8 (FP8) or from_pretrained (BF16), then ottava.convert"
            )
    try:
        model = ModelConfig(
            d_model=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config.get("num_key_value_heads", config["num_attention_heads"]),
            ffn=config["intermediate_size"],
            rope_theta=(rope.get("rope_theta") if isinstance(rope, dict) else None) or config.get("rope_theta", 1e4),
            norm_eps=config.get("rms_norm_eps", 1e-6),
        )
        head = config.get("head_dim") or model.d_model // model.heads
        if head * model.heads != model.d_model:
            raise ValueError(f"head_dim {head} x {model.heads} heads is not hidden_size {model.d_model}")
        longest = config.get("max_position_embeddings", 2048)
        sizes = {"max_position_embeddings": longest, "hidden_size": model.d_model, "intermediate_size": model.ffn}
        if wrong := [key for key, size in sizes.items() if type(size) is not int or not 0 < size <= _LARGEST]:
            raise ValueError(f"{wrong[0]} is {sizes[wrong[0]]!r}; needs 1 to {_LARGEST:,}")
        return model, longest
    except (KeyError, ValueError, TypeError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{folder}: its config.json does not describe a Llama: {what}") from error


def read_weights(folder: Path, config: ModelConfig) -> Checkpoint:
    """The weights in a folder as a checkpoint of step 0 without optimizer states; FP8 codes are decoded to FP32.

    Args:
        config: of the run that starts with them; it must be that of the folder.
    Raises:
        CheckpointError: the folder is damaged, or of another model; the message has the settings that fit.
    """
    try:
        if (folder / "config.json").is_file():
            source = of_folder(folder)
            found, _ = settings_of(source.config, folder)
            if found != config:
                apart = [f"--set model.{k}={v}" for k, v in found.model_dump().items() if v != getattr(config, k)]
                raise CheckpointError(f"{folder}: is of another model; it needs {' '.join(apart)}")
            tensors = {name: _numbers(pieces) for name, pieces in _joined_names(source, found, folder)}
        else:
            with ExitStack() as files:
                entries = open_tensors(folder, files)
                state = {name: file.get_tensor(name) for name, file in entries.items()}
            tensors = {n: t for n, t in dequantize_state_dict(state, torch.float32).items() if ".quantizers." not in n}
    except (UntrustedError, OSError, RuntimeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder}: cannot be read: {error}") from error
    return Checkpoint(folder, 0, {f"model.{name}": tensor for name, tensor in tensors.items()}, {})


def model_of(source: Source, folder: Path, recipe: str | Recipe | None) -> tuple[ByteTransformer, int]:
    """The trainer's model with the weights of a folder, and its longest sequence; FP8 weights stay codes.

    Args:
        recipe: for its layers; None: high precision.
    Raises:
        CheckpointError: the trainer's model cannot hold the weights.
        ValueError: the recipe cannot use the codes.
    """
    config, longest = settings_of(source.config, folder)
    chosen = get_recipe(recipe or "bf16")
    parts = list(_joined_names(source, config, folder))
    with torch.random.fork_rng(devices=[]):
        with torch.device("meta"):  # what config.json claims gets no memory before it fits the file
            claimed = ByteTransformer(config, 1)
        for name, pieces in parts:
            shape = (sum(piece.tensor.shape[0] for piece in pieces), *pieces[0].tensor.shape[1:])
            if shape != (needed := tuple(claimed.get_parameter(name).shape)):
                raise CheckpointError(f"{folder}: {name} has shape {shape}; its config.json needs {needed}")
        model = ByteTransformer(config, longest)
    coded = {}
    with torch.no_grad():
        for name, pieces in parts:
            cast = joined([piece.cast for piece in pieces])
            if cast is None and chosen.quantized and any(piece.codes is not None for piece in pieces):
                raise ValueError(
                    f"{folder}: {name} joins {', '.join(piece.module for piece in pieces)}, whose scales cannot be "
                    f"joined for recipe {chosen.name!r}; export the checkpoint again, or take 'bf16'"
                )
            if cast is not None:
                coded[name.removesuffix(".weight")] = cast
            model.get_parameter(name).copy_(_numbers(pieces))
    only = None if not coded else lambda name, _: name in coded
    if coded:
        convert(model, "bf16", filter=only)
    for module, cast in coded.items():
        old = model.get_submodule(module)._parameters["weight"]
        assert old is not None
        scales = store_scales(cast.scale_inv, cast.spec)
        weight = QuantizedWeight(cast.data.contiguous(), scales, cast.spec, torch.bfloat16)
        put_weight(module, old, weight, requires_grad=False)
        keep_in_state_dict(model.get_submodule(module), "weight")
    if chosen.quantized:
        try:
            convert(model, chosen, filter=only)
        except ValueError as error:
            raise ValueError(
                f"{folder}: recipe {chosen.name!r} cannot multiply its codes ({error}). To compare it under another "
                "recipe, write its weights in BF16 first: ottava import"
            ) from error
    return model, longest


def _joined_names(source: Source, config: ModelConfig, folder: Path) -> Iterator[tuple[str, list[Weight]]]:
    """Each parameter of the trainer's model with the tensors whose rows it has."""
    if config.layers > len(source.weights):
        raise CheckpointError(f"{folder}: has {len(source.weights)} tensors; its config says {config.layers} layers")
    weights = {weight.module: weight for weight in source.weights if weight.name.endswith(".weight")}
    if "lm_head" not in weights and "model.embed_tokens" in weights:
        weights["lm_head"] = weights["model.embed_tokens"]  # tied
    known = table(config)
    needed = {name for _, names in known for name in names}
    if missing := sorted(needed - weights.keys()):
        raise CheckpointError(f"{folder}: lacks {missing[0]}.weight and {len(missing) - 1} more tensors of its config")
    extra = sorted(one.name for one in source.weights if one.name.removesuffix(".weight") not in needed)
    if extra:
        raise CheckpointError(f"{folder}: holds {extra[0]}, which the model of `ottava train` does not have")
    for ours, theirs in known:
        yield f"{ours}.weight", [weights[name] for name in theirs]


def _numbers(pieces: Sequence[Weight]) -> Tensor:
    columns = {piece.name: tuple(piece.tensor.shape[1:]) for piece in pieces}
    if len(set(columns.values())) > 1:
        raise CheckpointError(f"matrices of one layer are stacked, and their columns differ: {columns}")
    return torch.cat([piece.tensor.float() for piece in pieces])


def joined(casts: Sequence[QuantizedTensor | None]) -> QuantizedTensor | None:
    """The cast of matrices that stand one below the other. None: one has no cast, or blocks would be cut.

    Example:
        >>> from ottava.ops.quantize import quantize
        >>> from ottava.numerics.formats import E4M3
        >>> from ottava.numerics.tensor import QuantizationSpec
        >>> from ottava.numerics.scaling import PER_ROW
        >>> one = quantize(torch.randn(3, 32), QuantizationSpec(E4M3, PER_ROW))
        >>> joined([one, one]).shape
        torch.Size([6, 32])
    """
    if any(cast is None for cast in casts):
        return None
    whole = [cast for cast in casts if cast is not None]
    first = whole[0]
    rows = first.spec.granularity.rows
    if any(cast.spec.granularity != first.spec.granularity for cast in whole):
        return None
    scales = [cast.scale_inv for cast in whole]
    if first.spec.granularity == PER_TENSOR:
        if any(not torch.equal(one, scales[0]) for one in scales):
            return None
        scale_inv = scales[0]
    elif rows is None or any(cast.shape[0] % rows for cast in whole[:-1]):
        return None
    else:
        scale_inv = torch.cat(scales)
    powers = [cast.spec for cast in whole if cast.spec.scale_format == "fp32"]
    spec = powers[0] if powers else first.spec
    return QuantizedTensor(torch.cat([cast.data for cast in whole]), scale_inv, spec, first.dtype)


def open_view(given: str, recipe: str | None = None) -> View:
    """The view that words of a command line name.

    Args:
        given: a run of `ottava train` or one of its checkpoints, or the folder of a checkpoint of Hugging Face's;
            behind an @ the name of a recipe, or "engine".
        recipe: in place of the name behind the @. None for a run: its own recipe. None for a checkpoint: what its
            weights stand for, in BF16 arithmetic.
    Raises:
        CheckpointError: there is no such folder, or it holds neither.
        ValueError: an unknown recipe, or one that cannot use the codes; two recipes.
    """
    path, own = Path(given), None
    if not path.exists() and "@" in given:
        head, _, own = given.rpartition("@")
        path = Path(head)
    if own and recipe and own != recipe:
        raise ValueError(f"{given} under {recipe}: name one recipe")
    recipe = own or recipe
    if recipe not in (None, ENGINE):
        get_recipe(str(recipe))  # an unknown name ends here
    if not path.is_dir() and not path.is_file():
        raise CheckpointError(f"{path}: does not exist; needed: a run of `ottava train`, or a checkpoint's folder")
    if (run_of(path) / "config.yaml").is_file():
        return _of_run(path, recipe)
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"{path}: has neither config.yaml (a run) nor config.json (a checkpoint), so nothing says what model it is"
        )
    return _of_bytes(path, recipe) if bytes_only(path) else of_hugging_face(path, recipe)


def _of_run(path: Path, recipe: str | None) -> View:
    if recipe == ENGINE:
        raise ValueError(f"{path}: engines serve checkpoints: run ottava export first, then compare OUT@{ENGINE}")
    model, config, checkpoint = model_of_run(path)
    masters = high_precision_weights(checkpoint)
    if recipe is not None:
        with torch.random.fork_rng(devices=[]):
            model = ByteTransformer(config.model, config.sequence_length)
        restore_weights(checkpoint, model)
        convert(model, recipe)
    model.eval()
    return View(
        named(path, recipe),
        model,
        blocks_of(model),
        as_llama(model, config.model, config.sequence_length, masters=masters),
        encode_bytes,
        decode_bytes,
        mixed=config.dtype == "bfloat16",
        longest=config.sequence_length,
    )


def _of_bytes(path: Path, recipe: str | None) -> View:
    source = of_folder(path)
    chosen = engine_recipe(source) if recipe == ENGINE else recipe
    model, longest = model_of(source, path, chosen)
    model.eval()
    if chosen is not None:
        config, _ = settings_of(source.config, path)
        source = Source(as_llama(model, config, longest).weights, source.config)
    name = named(path, recipe)
    return View(name, model, blocks_of(model), source, encode_bytes, decode_bytes, mixed=True, longest=longest)


def texts_of(paths: Sequence[Path]) -> dict[str, str]:
    """Name -> text of each file; without files the text that `ottava train` holds out by default.

    Raises:
        DataError: a file is missing, or no text.
    """
    if not paths:
        corpus = ByteCorpus.load(DataConfig())
        return {"held-out text": bytes(corpus.validation.numpy()).decode(errors="replace")}
    texts = {}
    for path in paths:
        try:
            regular_size(path)
            texts[str(path)] = path.read_text(encoding="utf-8", errors="replace")
        except (OSError, UntrustedError) as error:
            why = getattr(error, "strerror", None) or error
            raise DataError(f"{path}: cannot be read ({why}); --text takes a text file") from error
    return texts
