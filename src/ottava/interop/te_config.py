"""Reads a configuration of TransformerEngine's debug tool (nvdlfw_inspect) as settings of a watch.

A section of that file names layers, and features with tensors, statistics and steps. A watch measures every statistic
at every look, so a feature decides which tensors are looked at, and when. What has no counterpart is named in
`WatchConfig.notes`, and the watch repeats it as a warning.

Source: nvdlfw_inspect 0.2.2 (config_manager.py, for layers) and TransformerEngine 2.x (debug/features, for features and
`next_enabled_iter`, for steps).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from ottava.base.errors import need_known, unknown_name
from ottava.base.settings import ConfigError

TENSORS = MappingProxyType(
    {
        "activation": "input",
        "weight": "weight",
        "gradient": "grad_output",
        "output": "output",
        "wgrad": "grad_weight",
        "dgrad": "grad_input",
    }
)
"""TransformerEngine's names of tensors -> ours."""
RECIPES_OF_TE = MappingProxyType(
    {
        "fp8_delayed_scaling": "delayed",
        "fp8_current_scaling": "tensorwise",
        "fp8_block_scaling": "blockwise",
        "mxfp8": "mxfp8",
        "nvfp4": "nvfp4",
    }
)
OF_TENSOR = MappingProxyType({"mean": "mean", "std": "std", "cur_amax": "amax", "dynamic_range": "dynamic_range_bits"})
"""Statistic of a tensor before any cast, by the tool's name -> ours."""
OF_CAST = MappingProxyType({"underflows%": "underflow_pct_numel", "overflows%": "overflow_pct", "mse": "mse"})
"""Statistic of a cast -> ours."""
RECIPROCAL = MappingProxyType({"scale_inv_min": "scale_max", "scale_inv_max": "scale_min"})
"""Statistic of a cast whose reciprocal is ours."""
_STATISTICS = MappingProxyType({**OF_TENSOR, **OF_CAST, **RECIPROCAL})
"""A look records all of ours."""
_INSTEAD = MappingProxyType(
    {
        **dict.fromkeys(("min", "max"), "amax is that of both signs; a dump has the numbers themselves"),
        "l1_norm": "rms times the square root of numel is the l2 norm; of l1 there is none",
        "l2_norm": "it is rms times the square root of numel, both recorded",
        "max_blockwise_dynamic_range": "dynamic_range_bits is that of the whole tensor; `ottava what-if` tells blocks",
    }
)
"""Statistic that the watch does not record by itself -> what to read."""
_STEPS = frozenset({"freq", "start_step", "end_step", "start_end_list"})
_FOREVER = 2**53
_DIGITS = 4
"""Of the number of a layer: a range is written out, and no model has 10,000 layers."""


def is_te_config(tree: Mapping[str, Any]) -> bool:
    """Whether a YAML tree is a configuration of that tool: sections with `enabled` and `layers`.

    Example:
        >>> is_te_config({"stats": {"enabled": True, "layers": {"layer_types": ["fc1"]}}}), is_te_config({"every": 10})
        (True, False)
    """
    return bool(tree) and all(
        isinstance(section, Mapping) and {"enabled", "layers"} <= section.keys() for section in tree.values()
    )


def read_te_config(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a `WatchConfig` that do what the configuration asks.

    Raises:
        ConfigError: a section, a feature or a tensor is unknown, or a value has the wrong form.

    Example:
        >>> settings = read_te_config(
        ...     {"stats": {"enabled": True, "layers": {"layer_types": ["fc1"]},
        ...      "transformer_engine": {"LogFp8TensorStats": {"enabled": True, "tensors": ["activation"],
        ...      "stats": ["mxfp8_underflows%"], "freq": 10}}}})
        >>> settings["looks"], settings["recipes"]
        ([{'layers': ['re:fc1'], 'tensors': ['input'], 'every': 10, 'ranges': [], 'zero': 1}], ['mxfp8'])
    """
    return _Reader(tree).settings()


def read_logs(tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The statistics that a configuration logs: a `Period` each, with `stats` and the `feature`.

    Raises:
        ConfigError: as `read_te_config`.
    """
    return _Reader(tree).logs


class _Reader:
    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.logs: list[dict[str, Any]] = []
        self.looks: list[dict[str, Any]] = []
        self.dumps: list[dict[str, Any]] = []
        self.interventions: list[dict[str, Any]] = []
        self.recipes: dict[str, None] = {}
        self.notes: dict[str, None] = {}
        self.rows = 0
        self.features: Mapping[str, Callable[[str, Mapping[str, Any], list[str]], None]] = MappingProxyType(
            {
                **{f"Log{kind}TensorStats": self._statistics for kind in ("", "Fp8", "Nvfp4")},
                "DumpTensors": self._dump,
                **{f"Disable{kind}": self._disable for kind in ("FP8GEMM", "FP8Layer")},
                **{f"DisableQuantization{place}": self._disable for place in ("GEMM", "Layer")},
                "FakeQuant": self._fake,
                "PerTensorScaling": self._current,
            }
        )
        for name, section in tree.items():
            if _flag(section, "enabled", name):
                self.section(str(name), section)

    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"looks": self.looks, "sample": 1, "notes": list(self.notes)}
        settings |= {"recipes": list(self.recipes)} if self.recipes else {}
        settings |= {"interventions": self.interventions} if self.interventions else {}
        settings |= {"dump": {"periods": self.dumps, "rows": self.rows}} if self.dumps else {}
        tensors = {tensor for period in (*self.looks, *self.dumps) for tensor in period["tensors"]}
        order = [name for name in TENSORS.values() if name in tensors]
        return settings | ({"tensors": order} if order else {})

    def section(self, name: str, section: Mapping[str, Any]) -> None:
        layers = layer_patterns(name, section["layers"])
        features = {key: value for key, value in section.items() if key not in ("enabled", "layers")}
        of_engine = features.pop("transformer_engine", None) or {}
        if not isinstance(of_engine, Mapping):
            raise ConfigError(f"{name}.transformer_engine: got {of_engine!r}; needs a mapping of features")
        features |= of_engine
        for feature, config in features.items():
            where = f"{name}.{feature}"
            if feature not in self.features:  # one of their own in Python, or a typo: the rest of the file stands
                self.notes[f"{where}: {unknown_name('feature', feature, list(self.features))}"] = None
                continue
            if not isinstance(config, Mapping):
                raise ConfigError(f"{where}: got {config!r}; needs a mapping with `enabled`")
            if _flag(config, "enabled", where):
                self.features[feature](where, config, layers)

    def _statistics(self, where: str, config: Mapping[str, Any], layers: list[str]) -> None:
        for entry in entries_of(where, config, "tensors", "tensor"):
            stats = given if isinstance(given := entry.get("stats"), list) else [given]
            for statistic in stats:
                if isinstance(statistic, Mapping):  # {max_blockwise_dynamic_range: {block_size: 32, dims: 1}}
                    (statistic,) = _words(where, "stats", list(statistic))[:1]
                self._statistic(where, *_words(where, "stats", statistic))
            self.looks.append(_period(where, entry, layers))
            self.logs.append({**self.looks[-1], "stats": stats, "feature": where.rpartition(".")[2]})

    def _statistic(self, where: str, name: str) -> None:
        word = name.removesuffix("_columnwise")
        recipe = next((recipe for recipe in RECIPES_OF_TE if word.startswith(f"{recipe}_")), None)
        if recipe is not None:
            word = word.removeprefix(f"{recipe}_")
            self.recipes[RECIPES_OF_TE[recipe]] = None
            note = "layers of ottava show the casts of their own recipe; `ottava what-if` predicts others"
            self.notes[f"{where}: {name}: {note}"] = None
        if word in _INSTEAD:
            self.notes[f"{where}: {name}: {_INSTEAD[word]}"] = None
        elif word not in _STATISTICS:
            self.notes[f"{where}: the watch has no {name}; it records {', '.join(_STATISTICS.values())}, ..."] = None

    def _dump(self, where: str, config: Mapping[str, Any], layers: list[str]) -> None:
        for entry in entries_of(where, config, "tensors", "tensor"):
            if _flag(entry, "high_precision_tensor", where):
                self.rows = 2**31
            if not _flag(entry, "quantized_tensor", where):
                self.notes[f"{where}: a dump of the watch always holds the codes"] = None
            self.dumps.append(_period(where, entry, layers))

    def _disable(self, where: str, config: Mapping[str, Any], layers: list[str]) -> None:
        gemms = ["fprop", "dgrad", "wgrad"]
        if where.endswith("GEMM"):
            gemms = [gemm for entry in entries_of(where, config, "gemms", "gemm") for gemm in entry["gemm"]]
        self.interventions.append({"layers": layers, "gemms": gemms, "action": "high_precision"})

    def _fake(self, where: str, config: Mapping[str, Any], layers: list[str]) -> None:
        together: dict[tuple[Any, ...], dict[str, Any]] = {}  # both operands of a GEMM are one change
        for entry in _casts(where, config):
            form = str(entry.get("quant_format", "")).removeprefix("FP8")
            if form not in ("E4M3", "E5M2"):
                self.notes[f"{where}: quant_format {entry.get('quant_format')}: needs FP8E4M3 or FP8E5M2"] = None
                continue
            same = together.setdefault((form, *entry["gemm"]), {**entry, "tensor": []})
            same["tensor"] += [tensor for tensor in entry["tensor"] if tensor not in same["tensor"]]
        for (form, *_), entry in together.items():
            self._cast(where, entry, layers, {"action": "fake", "format": form})

    def _current(self, where: str, config: Mapping[str, Any], layers: list[str]) -> None:
        for entry in _casts(where, config):
            self._cast(where, entry, layers, {"action": "current"})

    def _cast(self, where: str, entry: Mapping[str, Any], layers: list[str], how: dict[str, Any]) -> None:
        if kept := {"output", "wgrad", "dgrad"} & set(entry["tensor"]):
            self.notes[f"{where}: the watch casts operands only, not {', '.join(sorted(kept))}"] = None
        tensors = [t for t in _tensors(where, entry["tensor"]) if t in ("input", "weight", "grad_output")]
        if tensors:
            self.interventions.append({"layers": layers, "gemms": entry["gemm"], "tensors": tensors, **how})


def _casts(where: str, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """GEMMs and tensors of casts: `gemms_struct` may hold a `tensors_struct`, each entry with keys of its own."""
    for gemms in entries_of(where, config, "gemms", "gemm"):
        yield from entries_of(where, gemms, "tensors", "tensor")


def layer_patterns(name: str, config: Any) -> list[str]:
    """Patterns of the layers of a section, as `is_layer_in_cfg` finds them."""
    known = ("layer_name_regex_pattern", "layer_types", "layer_numbers", "exact_layer_names")
    if not isinstance(config, Mapping) or not any(key in config for key in known):
        raise ConfigError(f"{name}.layers: got {config!r}; needs one of {', '.join(known)}")
    if unknown := [key for key in config if key not in known]:
        raise ConfigError(f"{name}.layers: {unknown_name('key', str(unknown[0]), known)}")
    if names := config.get("exact_layer_names"):
        return [f"re:^{re.escape(layer)}$" for layer in _words(f"{name}.layers", "exact_layer_names", names)]
    if pattern := config.get("layer_name_regex_pattern"):
        return [f"re:{pattern}"]
    parts = []
    types, numbers = config.get("layer_types"), config.get("layer_numbers")
    if types is not None and "all" not in (words := _words(f"{name}.layers", "layer_types", types)):
        parts.append("|".join(map(re.escape, words)))
    if numbers is not None and "all" not in (numbers if isinstance(numbers, list) else [numbers]):
        # a number that is a part of the name, and not the number in fc1
        parts.append(rf"(?<!fc)(?<!\d)(?:{'|'.join(map(str, _numbers(name, numbers)))})(?!\d)")
    if len(parts) == 2:
        return [f"re:^(?=.*(?:{parts[0]}))(?=.*{parts[1]})"]
    return [f"re:{part}" for part in parts] or ["*"]


def _numbers(name: str, given: Any) -> Iterator[int]:
    for entry in given if isinstance(given, list) else [given]:
        first, _, last = str(entry).partition("-")
        if not all(end.isdecimal() and len(end) <= _DIGITS for end in (first, last or first)):
            raise ConfigError(f"{name}.layers: layer_numbers {entry!r}: needs numbers below 10,000, or ranges as 0-3")
        yield from range(int(first), int(last or first) + 1)


def entries_of(where: str, config: Mapping[str, Any], several: str, one: str) -> Iterator[dict[str, Any]]:
    """The entries of `tensors` or `tensors_struct` (of gemms alike), each with its keys over those of the feature."""
    base = {key: value for key, value in config.items() if key not in (several, f"{several}_struct", "enabled")}
    structs = config.get(f"{several}_struct")
    if structs is None:
        yield {**base, one: _words(where, several, config.get(several))}
        return
    if not isinstance(structs, list) or not all(isinstance(entry, Mapping) and one in entry for entry in structs):
        raise ConfigError(f"{where}.{several}_struct: needs a list of mappings with `{one}`")
    for entry in structs:
        yield {**base, **entry, one: _words(where, one, entry[one])}


def _period(where: str, entry: Mapping[str, Any], layers: list[str]) -> dict[str, Any]:
    """A `Period`; their first iteration is 0, and our first step 1."""
    for key in _STEPS & entry.keys():
        value = entry[key]
        if key == "start_end_list":
            fits = isinstance(value, list) and all(
                isinstance(pair, list) and len(pair) == 2 and all(type(end) is int for end in pair) for pair in value
            )
            fits = fits or value is None
        else:
            fits = value is None or type(value) is int
        if not fits:
            needs = "a list of [first, last]" if key == "start_end_list" else "a whole number"
            raise ConfigError(f"{where}.{key}: got {value!r}; needs {needs}")
    ranges = entry.get("start_end_list")
    if not ranges and (entry.get("start_step") is not None or entry.get("end_step") not in (None, -1)):
        end = entry.get("end_step")
        ranges = [[entry.get("start_step") or 0, _FOREVER if end in (None, -1) else end]]
    tensors = _tensors(where, entry["tensor"])
    return {"layers": layers, "tensors": tensors, "every": entry.get("freq") or 1, "ranges": ranges or [], "zero": 1}


def _tensors(where: str, names: Any) -> list[str]:
    for name in (words := _words(where, "tensors", names)):
        need_known(where, "tensor", name, TENSORS, ConfigError)
    return [TENSORS[name] for name in words]


def _words(where: str, key: str, value: Any) -> list[str]:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"{where}.{key}: got {value!r}; needs a name or a list of names")
    return words


def _flag(config: Any, key: str, where: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{where}.{key}: got {value!r}; needs true or false")
    return value
