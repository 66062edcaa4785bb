"""The formula of a forward: which fields of config.json change what is computed, and whether both sides agree on them.

The rule is an allowlist. A field is equal on both sides, or one of `NEUTRAL`, which change no number of a forward, or
it is a finding: "formula" for one that both sides have, "unknown" for one that only one side has, or that no rule here
reads. What is not understood is not certified.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ottava.base.settings import flatten
from ottava.base.untrusted import UntrustedError, parse_json, read_text

NEUTRAL = frozenset(
    ("_name_or_path", "transformers_version", "output_hidden_states", "output_attentions", "return_dict")
    + ("use_cache", "initializer_range", "id2label", "label2id", "problem_type", "torchscript", "num_labels")
    + ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "classifier_dropout")
    + ("router_aux_loss_coef", "output_router_logits", "gradient_checkpointing", "_commit_hash")
    + ("quantization_config", "tie_word_embeddings")
)
"""Fields of config.json that change no number of a forward at inference; the last two have rules of their own."""
_SAMPLING = frozenset(("transformers_version", "_from_model_config", "bos_token_id", "eos_token_id", "pad_token_id"))
_BF16 = ("bfloat16", "torch.bfloat16", "auto", None)
_READ = ...
"""Any value: another rule reads it."""
_NONE = (None, False, "")
_ARGUMENTS = MappingProxyType(
    dict.fromkeys(("num_bits", "type", "strategy", "dynamic", "group_size", "block_structure"), _READ)
    | dict.fromkeys(("actorder", "zp_dtype"), _NONE)
    | {"symmetric": (True,), "observer": _READ, "observer_kwargs": _NONE, "scale_dtype": _READ}
)
_KINDS = ("float-quantized", "mxfp8-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized")
_QUANTIZATION = MappingProxyType(
    dict.fromkeys(("quant_method", "ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules"), _READ)
    | dict.fromkeys(("kv_cache_scheme", "kv_cache_quant_algo", "producer", "version"), _READ)
    | dict.fromkeys(("activation_scheme", "weight_block_size", "quant_algo", "global_compression_ratio"), _READ)
    | dict.fromkeys(("sparsity_config", "transform_config", "dequantize", "modules_to_convert"), _NONE)
    | {"config_groups": _READ, "format": _KINDS, "quantization_status": ("compressed", "frozen"), "fmt": ("e4m3",)}
    | {"scale_fmt": ("ue8m0", "float", None)}
)
"""Fields of a quantization_config, and their values that a rule here or of `weights.layouts` understands."""
_GROUP = MappingProxyType(
    dict.fromkeys(("targets", "weights", "input_activations"), _READ)
    | {"output_activations": _NONE, "format": (None, *_KINDS)}
)
_SETTINGS = MappingProxyType(
    dict.fromkeys(("model", "host", "port", "gpu_memory_utilization", "max_num_seqs", "trust_remote_code"), _READ)
    | dict.fromkeys(("device", "disable_log_stats", "download_dir", "load_format", "served_model_name"), _READ)
    | {"dtype": _BF16, "torch_dtype": _BF16, "enforce_eager": _READ}
    | dict.fromkeys(("attention_backend", "attn_implementation"), (None, "sdpa", "eager", "FLASH_ATTN", "flashinfer")
    + ("flash_attention_2", "flash_attention_3", "FLASHINFER", "TORCH_SDPA", "fa3", "triton"))
)  # fmt: skip
"""Settings of an engine that change no operand of a linear, and their values; attention sums in another order."""

Cause = tuple[str, str]
"""("formula" or "unknown", what was found)."""


def formula_causes(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], *, sides: tuple[str, str] = ("in training", "in config.json")
) -> list[Cause]:
    """The fields of config.json by which two sides do not compute the same.

    Args:
        ours: config of the training, without a quantization_config.
        theirs: config of the checkpoint.
        sides: where each one is, in words.

    Example:
        >>> formula_causes({"rms_norm_eps": 1e-6}, {"rms_norm_eps": 1e-5, "use_cache": False})
        [('formula', 'rms_norm_eps is 1e-06 in training, and 1e-05 in config.json')]
        >>> formula_causes({}, {"logit_cap": 30.0})
        [('unknown', 'logit_cap is 30.0 in config.json, and not in training')]
    """
    if not ours or ours.get("model_type") is None:
        ours = {**ours, **{key: theirs[key] for key in ("model_type", "architectures") if key in theirs}}
    found: list[Cause] = []
    here, there = sides
    if twice := _rope_twice(theirs):
        found.append(("unknown", twice))
    a, b = canonical(ours), canonical(theirs)
    if a.keys() - NEUTRAL != b.keys() - NEUTRAL:  # one side leaves defaults out
        a, b = _with_defaults(a), _with_defaults(b)
    dtype, _ = b.pop("dtype", None), a.pop("dtype", None)
    if str(dtype) not in map(str, _BF16):
        found.append(("formula", f"dtype is {dtype} in config.json; operands in BF16 are certified only"))
    for key in sorted({*a, *b} - NEUTRAL):
        if key in a and key in b:
            if a[key] != b[key]:
                found.append(("formula", f"{key} is {_short(a[key])} {here}, and {_short(b[key])} {there}"))
        else:
            value, one, other = (b[key], there, here) if key in b else (a[key], here, there)
            found.append(("unknown", f"{key} is {_short(value)} {one}, and not {other}"))
    return found


def canonical(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with one name for each field, as JSON has it.

    Example:
        >>> canonical({"torch_dtype": "bfloat16", "rope_theta": 5.0, "rope_scaling": None})["rope_parameters"]
        {'rope_theta': 5.0, 'rope_type': 'default'}
    """
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    if "torch_dtype" in plain:
        plain.setdefault("dtype", plain.pop("torch_dtype"))
    rope = dict(plain.pop("rope_parameters", None) or plain.pop("rope_scaling", None) or {})
    plain.pop("rope_scaling", None)
    theta = plain.pop("rope_theta", None)
    if rope or theta is not None:
        rope["rope_type"] = rope.pop("type", rope.get("rope_type", "default"))
        plain["rope_parameters"] = {**({} if theta is None else {"rope_theta": theta}), **rope}
    return dict(json.loads(json.dumps(plain, sort_keys=True, default=str)))


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """The fields that config's class in transformers adds; config as it is without the library or for another model."""
    if not config.get("model_type"):
        return config
    try:
        from transformers import AutoConfig

        made = canonical(AutoConfig.for_model(**config).to_dict())
    except Exception:  # transformers refuses a config with errors of any kind; its fields are compared as they are
        return config
    return {**made, **{key: value for key, value in config.items() if key not in made}}


def _rope_twice(config: Mapping[str, Any]) -> str:
    inside = (config.get("rope_parameters") or config.get("rope_scaling") or {}).get("rope_theta")
    theta = config.get("rope_theta")
    if None in (inside, theta) or inside == theta:
        return ""
    return f"rope_theta is {theta} in config.json, and {inside} in its rope_parameters: libraries take either"


def quantization_causes(config: Mapping[str, Any]) -> Iterator[Cause]:
    """What no rule reads in a quantization_config.

    Example:
        >>> list(quantization_causes({"quant_method": "fp8", "fmt": "e5m2", "rotation": "hadamard"}))
        [('unknown', 'fmt is e5m2 in quantization_config'), ('unknown', 'rotation is hadamard in quantization_config')]
    """
    yield from _unknown(config, _QUANTIZATION, "quantization_config")
    for group in (config.get("config_groups") or {}).values():
        yield from _unknown(group, _GROUP, "a group")
        for part in ("weights", "input_activations"):
            yield from _unknown(group.get(part) or {}, _ARGUMENTS, part)


def settings_causes(settings: Mapping[str, Any], known: Mapping[str, str]) -> Iterator[Cause]:
    """Settings of an engine that no rule reads; `known` are those that the engine's entry has."""
    unread = {key: value for key, value in flatten(settings).items() if key not in known}
    yield from _unknown(unread, _SETTINGS, "the settings of the engine")


def _unknown(found: Mapping[str, Any], known: Mapping[str, Any], where: str) -> Iterator[Cause]:
    for key, value in found.items():
        allowed = known.get(key, ())
        if allowed is not _READ and value not in allowed and not (None in allowed and value in ({}, [])):
            yield "unknown", f"{key} is {_short(value)} in {where}"


def sampling_causes(ours: Path | None, folder: Path) -> list[Cause]:
    """What generation_config.json asks of the sampler, and training does not.

    Args:
        ours: the file of the training; None: it has none.
    """
    name = "generation_config.json"
    a, b = (_read(path) for path in (ours, folder / name))
    keys = sorted(key for key in {*a, *b} - _SAMPLING if a.get(key) != b.get(key)) if b else []
    return [("formula" if key in a and key in b else "unknown", f"{key} is {_short(b.get(key))} in {name}, and "
             f"{_short(a[key]) if key in a else 'nothing'} in training") for key in keys]  # fmt: skip


def _read(path: Path | None) -> dict[str, Any]:
    if path is None or not path.is_file():
        return {}
    found = parse_json(read_text(path))
    if not isinstance(found, dict):
        raise UntrustedError(f"{path} is no object")
    return found


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
