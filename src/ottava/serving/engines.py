"""How inference engines read a quantization_config: which linears stay in BF16, and how activations are cast.

Each engine holds the patterns of its list of ignored layers against names in its own way, and joins linears under
names of its own. Both are data here. A new engine is one entry of `ENGINES`. Sources, file and function, are in the
table of docs/serving.md: vLLM 0.33.0, SGLang 0.5.23, transformers 5.23 with compressed-tensors 0.20. TensorRT-LLM's
modeling_utils.py was read without a noted version.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Literal

from ottava.base.text import grouped
from ottava.base.untrusted import UntrustedError
from ottava.numerics.scaling import BLOCK_1X32, PER_ROW, PER_TENSOR, Granularity
from ottava.weights.layouts import REGEX, compiled, matches, read_quantization

Match = Callable[[str, str], bool]
"""(pattern, name of a module) -> whether the pattern is meant for it."""


def exact(pattern: str, name: str) -> bool:
    """The whole name."""
    return pattern == name


def regex(pattern: str, name: str) -> bool:
    """A regular expression behind "re:", from the start of the name; its end is open."""
    return matches(pattern, name)


def whole_regex(pattern: str, name: str) -> bool:
    """A regular expression behind "re:", for the whole name."""
    return pattern.startswith(REGEX) and compiled(pattern[len(REGEX) :]).fullmatch(name) is not None


def contains(pattern: str, name: str) -> bool:
    """Anywhere in the name, also in the middle of a word."""
    return pattern in name


def within(pattern: str, name: str) -> bool:
    """The name of a module of experts, anywhere in the pattern: one expert that is listed keeps all of them."""
    return name.endswith("experts") and name in pattern


def suffix(pattern: str, name: str) -> bool:
    """The whole name, or its last words."""
    return f".{name}".endswith(f".{pattern}")


def dotted(pattern: str, name: str) -> bool:
    """Whole words of the name, one after the other."""
    return f".{pattern.rstrip('.')}." in f".{name}."


def shell(pattern: str, name: str) -> bool:
    """A shell pattern; * matches dots, too."""
    return fnmatchcase(name, pattern)


def shell_word(pattern: str, name: str) -> bool:
    """A shell pattern for the name, or for one word of it."""
    return any(fnmatchcase(one, pattern) for one in (name, *name.split(".")))


def bounded(pattern: str, name: str) -> bool:
    """transformers: a regular expression from the start of the name to the end of a word, or the end of the name.

    Example:
        >>> bounded("mlp.gate", "mlp.gate_proj"), bounded("layers.1", "layers.1.up"), bounded("up", "layers.1.up")
        (False, True, True)
    """
    return (
        name.endswith(pattern) or compiled(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", shown=pattern).match(name) is not None
    )


@dataclass(frozen=True)
class IgnoreRule:
    """How one engine reads the list of ignored layers of one quant_method."""

    keys: tuple[str, ...]
    """Where the config has the list; the first key that is there."""
    parts: tuple[Match, ...]
    """Held against the name of each linear of the checkpoint."""
    joined: tuple[Match, ...] = ()
    """Held against the engine's name of the linear, which may join several."""
    parents: bool = False
    """Whether the modules above a linear are tried, too."""
    partly: Literal["refuse", "all", "apart"] = "refuse"
    """If some parts of a joined linear match: the engine refuses, ignores all of them, or never joins them."""


@dataclass(frozen=True)
class Arithmetic:
    """The numbers that an engine multiplies, for a cast that its config describes."""

    weights: Literal["codes", "bf16", "bf16-scales"] = "codes"
    """Codes times scales; these rounded to BF16; or codes times scales in BF16, rounded to BF16."""
    inputs: Literal["fp32", "bf16", "none"] = "fp32"
    """Scales and quotients in FP32; in BF16, as compressed-tensors computes them; or no cast at all."""

    device: bool = False
    """Whether it multiplies otherwise on another device."""


EXACT = Arithmetic()


@dataclass(frozen=True)
class InferenceEngine:
    """One engine."""

    name: str
    rules: Mapping[str, IgnoreRule]
    """By quant_method; a method that lacks is not read."""
    tensor_dynamic: Granularity | None = None
    """What it does in place of one dynamic scale for all tokens; None: that."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Path of a setting of its own -> our word for it: "fuse_act_quant", "ue8m0" or "kv_cache_dtype"."""
    on_gpus: Mapping[str, str] = field(default_factory=dict)
    """Our word for a setting -> what it is on a GPU unless somebody sets it."""
    note: str = ""
    """What a certificate says of these defaults."""
    never: str = r"(?:.*\.)?(?:lm_head|router|gate|gating|shared_expert_gate)"
    """Linears that it never casts, whatever the config says: their classes take no scheme."""
    casts_heads: str = ""
    """The quant_method under which it does cast a head, unless the config leaves it out."""
    refuses: tuple[tuple[str, str, str], ...] = ()
    """(format of compressed-tensors or quant_method, model_type or "", why the engine reads it wrong)."""

    whole: str = ""
    """Linears with an input of four dimensions: "a scale a token" of compressed-tensors is one for all tokens there."""
    experts: tuple[tuple[int, Granularity], ...] | None = None
    """(bits, blocks) of compressed-tensors in which it loads experts; None: all."""

    arithmetic: tuple[tuple[str, str, Arithmetic], ...] = ()
    """(quant_method or format, device or "", how it multiplies); the first that fits. Else codes and FP32 scales."""
    evidence: Mapping[str, str] = field(default_factory=dict)
    """Rule of `RULES` -> how it is known, if it is more than assumed."""

    @property
    def known(self) -> str:
        """How well its rules are known, in words."""
        known = grouped((self.evidence.get(rule, "assumed"), rule) for rule in RULES)
        return "; ".join(f"{how}: {', '.join(rules)}" for how, rules in known.items())

    def multiplies(self, config: Mapping[str, Any], device: str, *, expert: bool = False) -> Arithmetic:
        """How it multiplies what this quantization_config describes, on "cpu" or "cuda"; an expert or not."""
        method = str(config.get("quant_method", "")).lower()
        kinds = (f"experts of {method}",) if expert and self.experts is not None else (config.get("format"), method)
        fit = (how for kind, place, how in self.arithmetic if kind in kinds and place in ("", device))
        return next(fit, EXACT)

    def unread(self, config: Mapping[str, Any], model_type: str = "", *, experts: bool = False) -> str:
        """Why it does not read a checkpoint, or reads it wrong; "" if it does.

        Args:
            config: the quantization_config.
            model_type: of config.json.
            experts: whether experts are quantized.
        """
        method = str(config.get("quant_method", "")).lower()
        if method and method not in self.rules:
            return f"{self.name} does not read quant_method {method!r}; it reads {', '.join(self.rules)}"
        for kind, family, why in self.refuses:
            if kind in (method, config.get("format")) and family in ("", model_type):
                return f"{self.name} {why}"
        if experts and self.experts is not None and method == "compressed-tensors":
            for group in read_quantization(config).groups:
                if (group.bits, group.blocks) not in self.experts:
                    kind = f"{group.bits} bits with scales for {group.blocks}"
                    return f"{self.name} loads no experts of {kind} in compressed-tensors"
        return ""

    def leaves(self, name: str, method: str = "") -> str:
        """Why the engine never casts this linear; "" if it does as the config says."""
        if method and method == self.casts_heads and name.rpartition(".")[2] == "lm_head":
            return ""
        return f"{self.name} never casts it" if self.never and re.fullmatch(self.never, name) else ""


@dataclass(frozen=True)
class Decision:
    """What an engine does with a linear."""

    quantized: bool
    pattern: str = ""
    """The pattern that keeps it in BF16."""
    rule: str = ""
    """The rule by which the pattern matches, and the name that it was held against."""
    refused: str = ""
    """Why the engine does not load it."""


RULES = ("ignored layers", "joined linears", "decoding", "casts of activations", "experts", "other devices")
"""What is known of an engine, or assumed: of TensorRT-LLM no version was noted. Only transformers ran."""
JOINED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
)
"""The linears that engines join, by the name of the joined one."""
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.\w+")
_FUSED = re.compile(r"(?P<place>.*)\.(?:(?P<qkv>[qkv]_proj)|(?P<gate_up>gate_proj|up_proj|w1|w3))$")

_MODELOPT_KEYS = ("ignore", "exclude_modules")
_FP8_KEYS = ("ignored_layers", "modules_to_not_convert")
_SGLANG_FP8 = IgnoreRule(_FP8_KEYS, (dotted,), joined=(within,))
_HF_FP8 = IgnoreRule(("modules_to_not_convert",), (bounded,), partly="apart")
_RENAMED = "renames weight_scale_inv of a Llama, and loses the scales; take compressed-tensors-block"
_DEEP_GEMM = (
    "on Hopper and Blackwell vllm 0.33.0 rounds scales of 128x128 blocks, and those of their inputs, to powers of two; "
    'an older GPU does not, and neither does --engine-config with {"env": {"VLLM_USE_DEEP_GEMM_E8M0": "0"}}'
)
_TRT_KEYS = ("exclude_modules", "ignore", "modules_to_not_convert")
_TRT = IgnoreRule(_TRT_KEYS, (shell, whole_regex), joined=(shell, whole_regex), parents=True, partly="all")
_OTHER_NAMES = "reads mxfp8 by ModelOpt's names, weight_scale and ignored_layers; take compressed-tensors-mxfp8"

_ENTRIES = (
    InferenceEngine(
        "vllm",
        MappingProxyType(
            {
                "compressed-tensors": IgnoreRule(("ignore",), (exact, regex), joined=(exact, regex)),
                "fp8": IgnoreRule(_FP8_KEYS, (exact,), joined=(exact, within)),
                "mxfp8": IgnoreRule(("ignored_layers",), (exact,), joined=(exact, within, contains, shell)),
                "modelopt": IgnoreRule(_MODELOPT_KEYS, (exact,), joined=(exact, within, contains, shell)),
            }
        ),
        tensor_dynamic=PER_ROW,
        casts_heads="modelopt",
        settings=MappingProxyType(
            {
                "compilation_config.pass_config.fuse_act_quant": "fuse_act_quant",
                "env.VLLM_USE_DEEP_GEMM": "ue8m0",  # without it nothing rounds scales
                "env.VLLM_USE_DEEP_GEMM_E8M0": "ue8m0",
                "kv_cache_dtype": "kv_cache_dtype",
            }
        ),
        refuses=(("mxfp8", "", _OTHER_NAMES),),
        on_gpus=MappingProxyType({"ue8m0": "1"}),
        note=_DEEP_GEMM,
        evidence=MappingProxyType(dict.fromkeys(RULES, "read in source 0.33.0")),
    ),
    InferenceEngine(
        "sglang",
        MappingProxyType(
            {
                "compressed-tensors": IgnoreRule(("ignore",), (suffix, regex), joined=(exact,)),
                "fp8": _SGLANG_FP8,
                "mxfp8": _SGLANG_FP8,
                "modelopt": IgnoreRule(_MODELOPT_KEYS, (dotted,), joined=(shell_word, within)),
            }
        ),
        tensor_dynamic=PER_ROW,
        casts_heads="modelopt",
        settings=MappingProxyType({"kv_cache_dtype": "kv_cache_dtype", "env.DEEPGEMM_SCALE_UE8M0": "ue8m0"}),
        refuses=(
            ("mxfp8-quantized", "", "has no scheme for mxfp8 of compressed-tensors; take layout mxfp8"),
            ("mxfp4-pack-quantized", "", "has no scheme for MXFP4 of a dense linear; take compressed-tensors-nvfp4"),
            *(("fp8", family, _RENAMED) for family in ("llama", "mistral", "ministral3")),
        ),
        evidence=MappingProxyType(dict.fromkeys(RULES, "read in source 0.5.23")),
    ),
    InferenceEngine(
        "transformers",
        MappingProxyType(
            {
                "compressed-tensors": IgnoreRule(("ignore",), (exact, regex), partly="apart"),
                "fp8": _HF_FP8,
                "mxfp8": _HF_FP8,
            }
        ),
        never="",
        evidence=MappingProxyType(
            dict.fromkeys(RULES, "executed, 5.23.0 with compressed-tensors 0.20.0 on a CPU")
            | {"other devices": "read in source 5.23.0"}
        ),
        whole=r".*\.kv_b_proj",
        arithmetic=(
            ("experts of compressed-tensors", "", Arithmetic("bf16", "none")),
            ("experts of fp8", "cpu", Arithmetic("bf16", "none", device=True)),
            ("experts of mxfp8", "cpu", Arithmetic("bf16", "none", device=True)),
            ("nvfp4-pack-quantized", "", Arithmetic("bf16", "bf16")),
            ("compressed-tensors", "", Arithmetic("bf16-scales", "bf16")),
            ("fp8", "cpu", Arithmetic("bf16", "none", device=True)),
            ("mxfp8", "cpu", Arithmetic("bf16", "none", device=True)),
        ),
        experts=((8, PER_TENSOR), (8, PER_ROW), (4, BLOCK_1X32)),  # of others it fails, or drops the tensor's scale
    ),
    InferenceEngine(
        "trtllm",
        MappingProxyType({"modelopt": _TRT, "fp8": _TRT, "compressed-tensors": _TRT}),
        settings=MappingProxyType({"kv_cache_dtype": "kv_cache_dtype", "kv_cache_config.dtype": "kv_cache_dtype"}),
    ),
)
ENGINES: Mapping[str, InferenceEngine] = MappingProxyType({engine.name: engine for engine in _ENTRIES})


def decide(rule: IgnoreRule, config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Decision]:
    """What an engine does with each linear of a checkpoint.

    Args:
        rule: of the engine, for this quant_method.
        config: the quantization_config.
        names: of the linears in the checkpoint.
    Raises:
        UntrustedError: the list is no list of texts, or one of them is no regular expression.

    Example:
        >>> names = ["l.0.mlp.gate_proj", "l.0.mlp.up_proj", "l.0.mlp.down_proj"]
        >>> rule = ENGINES["vllm"].rules["modelopt"]
        >>> [one.quantized for one in decide(rule, {"ignore": ["l.0.mlp.gate"]}, names).values()]
        [False, False, True]
    """
    found: Any = next((config[key] for key in rule.keys if config.get(key) is not None), [])
    if not isinstance(found, list) or not all(isinstance(pattern, str) for pattern in found):
        raise UntrustedError(f"quantization_config: the list of ignored layers is {found!r}; needs a list of names")
    groups = read_quantization(config).groups if config.get("config_groups") else None
    decided: dict[str, Decision] = {}
    for joined, parts in units(names).items():
        each = {part: _ignored(rule, found, joined, part) for part in parts}
        for part in parts:
            if each[part].quantized and groups is not None and not any(group.has(part) for group in groups):
                each[part] = Decision(False, "", "no group of the config has it as a target")
        kept = [decision for decision in each.values() if not decision.quantized]
        if rule.partly == "apart" or len(kept) in (0, len(parts)):
            decided |= each
            continue
        if rule.partly == "all":
            decided |= dict.fromkeys(parts, kept[0])
            continue
        stays = ", ".join(part.rpartition(".")[2] for part in parts if not each[part].quantized)
        refused = f"it joins {len(parts)} linears into {joined}, and the config leaves only {stays} in BF16"
        decided |= dict.fromkeys(parts, Decision(kept[0].quantized, kept[0].pattern, kept[0].rule, refused))
    return decided


def units(names: Iterable[str]) -> dict[str, list[str]]:
    """The engine's linears -> the linears of the checkpoint that each joins; in their order.

    Example:
        >>> units(["a.q_proj", "a.k_proj", "a.v_proj", "a.o_proj"])
        {'a.qkv_proj': ['a.q_proj', 'a.k_proj', 'a.v_proj'], 'a.o_proj': ['a.o_proj']}
    """
    place_of = {part: joined for joined, parts in JOINED.items() for part in parts}

    def whole(name: str) -> str:
        place, _, last = name.rpartition(".")
        if expert := _EXPERT.fullmatch(name):
            return expert[1]
        joined = place_of.get(last, last)
        return f"{place}.{joined}" if place else joined

    return grouped((whole(name), name) for name in names)


def sharing(names: Iterable[str]) -> list[list[str]]:
    """The linears that are one matrix to an engine, of an expert, too: they need one precision, and per tensor one
    scale. The others alone.

    Example:
        >>> sharing(["a.q_proj", "a.k_proj", "b.experts.0.w1", "b.experts.0.w2", "b.experts.0.w3"])
        [['a.q_proj', 'a.k_proj'], ['b.experts.0.w1', 'b.experts.0.w3'], ['b.experts.0.w2']]
    """

    def whole(name: str) -> tuple[str, str]:
        match = _FUSED.fullmatch(name)
        return (name, "") if match is None else (match["place"], "qkv" if match["qkv"] else "gate_up")

    return list(grouped((whole(name), name) for name in names).values())


def _ignored(rule: IgnoreRule, patterns: Sequence[str], joined: str, part: str) -> Decision:
    tried = [(match, part) for match in rule.parts]
    if rule.parents:
        above = part.split(".")
        tried += [(match, ".".join(above[:i])) for i in range(len(above) - 1, 0, -1) for match in rule.parts]
    if rule.partly != "apart":
        tried += [(match, joined) for match in rule.joined]
    for match, name in tried:
        for pattern in patterns:
            if match(pattern, name):
                return Decision(False, pattern, f"{match.__name__}, against {name}")
    return Decision(True)
