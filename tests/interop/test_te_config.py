"""Configurations of TransformerEngine's debug tool: the same layers, tensors and steps, or a note by name."""

from __future__ import annotations

from pathlib import Path
from string import Template
from typing import Any

import pytest
import yaml

from ottava.base.settings import ConfigError, read_yaml
from ottava.diagnose.remedies import REMEDIES
from ottava.interop.te_config import is_te_config, read_te_config
from ottava.measure.layer_names import matches
from ottava.recipe import get_recipe
from ottava.watching.config import Period, WatchConfig
from ottava.watching.doors import changed

LAYERS = (
    *(f"decoder.layers.{i}.self_attention.{part}" for i in range(12) for part in ("layernorm_qkv", "proj")),
    *(f"decoder.layers.{i}.mlp.{part}" for i in range(12) for part in ("fc1", "fc2")),
    "output_layer",
)


def config(layers: Any, **features: Any) -> dict[str, Any]:
    return {"section": {"enabled": True, "layers": layers, "transformer_engine": features}}


def statistics(**settings: Any) -> dict[str, Any]:
    return {"LogFp8TensorStats": {"enabled": True, "tensors": ["activation"], "stats": ["mse"], **settings}}


def test_layers_are_those_of_the_tool() -> None:
    """Substrings, regular expressions found anywhere, numbers that are not the number of fc1."""
    for layers, wanted in (
        ({"layer_types": ["fc1", "qkv"]}, lambda n: "fc1" in n or "qkv" in n),
        ({"layer_types": ["all"]}, lambda n: True),
        ({"layer_name_regex_pattern": r"layers\.1\..*fc"}, lambda n: ".1." in n and "fc" in n),
        ({"layer_numbers": [1, "3-4"]}, lambda n: any(f".{i}." in n for i in (1, 3, 4))),
        ({"layer_numbers": [1], "layer_types": ["fc2"]}, lambda n: n.endswith(".1.mlp.fc2")),
        ({"layer_numbers": "all"}, lambda n: True),
        ({"exact_layer_names": ["output_layer"]}, lambda n: n == "output_layer"),
    ):
        (period,) = WatchConfig.load(config(layers, **statistics())).looks
        assert [n for n in LAYERS if matches(n, period.layers)] == [n for n in LAYERS if wanted(n)], layers


def test_layers_and_steps_agree_with_the_tool_itself() -> None:
    """Its own matching, where the package is installed."""
    manager = pytest.importorskip("nvdlfw_inspect.config_manager")
    for layers in (
        {"layer_types": ["fc1", "qkv"]},
        {"layer_name_regex_pattern": r"layers\.(1|11)\..*proj"},
        {"layer_types": ["fc2"], "layer_numbers": [1, "3-11"]},
    ):
        spec = manager.ConfigSpec()
        spec.initialize({"enabled": True, "layers": dict(layers)})
        (period,) = WatchConfig.load(config(layers, **statistics())).looks
        for name in LAYERS[:-1]:
            assert matches(name, period.layers) == bool(manager.is_layer_in_cfg(name, spec)), (layers, name)


def test_steps_are_those_of_the_tool() -> None:
    """Its iteration 0 is our step 1; a list of ranges beats start and end."""

    def theirs(iteration: int, freq: int = 1, ranges: Any = None, start: int = 0, end: float = float("inf")) -> bool:
        return iteration % freq == 0 and any(a <= iteration <= b for a, b in ranges or [(start, end)])

    for keys, arguments in (
        ({}, {}),
        ({"freq": 10}, {"freq": 10}),
        ({"freq": 3, "start_step": 5, "end_step": 17}, {"freq": 3, "start": 5, "end": 17}),
        ({"freq": 2, "start_step": 7, "end_step": -1}, {"freq": 2, "start": 7}),
        ({"freq": 5, "start_end_list": [[0, 10], [20, 22]]}, {"freq": 5, "ranges": [(0, 10), (20, 22)]}),
    ):
        (period,) = WatchConfig.load(config({"layer_types": ["all"]}, **statistics(**keys))).looks
        assert [s for s in range(1, 60) if period.chooses(s)] == [i + 1 for i in range(59) if theirs(i, **arguments)]


def test_each_feature_becomes_settings(tmp_path: Path) -> None:
    """A whole file, and what it cannot do by name."""
    (tmp_path / "te.yaml").write_text(
        "log:\n  enabled: True\n  layers: {layer_types: [fc1]}\n"
        "  LogTensorStats: {enabled: True, tensors: [activation, gradient], stats: [std, l1_norm], freq: 5}\n"
        "  transformer_engine:\n    LogFp8TensorStats:\n      enabled: True\n      tensors_struct:\n"
        "      - {tensor: weight, stats: [mxfp8_underflows%_columnwise, scale_inv_min], freq: 4}\n"
        "      - {tensor: wgrad, stats: [fp8_block_scaling_mse]}\n"
        "    DumpTensors: {enabled: True, tensors: activation, quantized_tensor: True, freq: 100}\n"
        "    LogNvfp4TensorStats: {enabled: False}\n"
        "off:\n  enabled: False\n  layers: {layer_types: [all]}\n"
        "change:\n  enabled: True\n  layers: {layer_name_regex_pattern: 'layers\\.0'}\n  transformer_engine:\n"
        "    DisableFP8GEMM: {enabled: True, gemms: [wgrad]}\n"
        "    FakeQuant: {enabled: True, quant_format: FP8E5M2,\n"
        "      gemms_struct: [{gemm: dgrad, tensors: [gradient, dgrad]}]}\n"
        "last:\n  enabled: True\n  layers: {layer_types: [output_layer]}\n  transformer_engine:\n"
        "    DisableFP8Layer: {enabled: True}\n"
        "    PerTensorScaling: {enabled: True, gemms: [fprop], tensors: [activation]}\n"
    )
    assert is_te_config(read_yaml(tmp_path / "te.yaml"))
    settings = WatchConfig.load(tmp_path / "te.yaml")
    assert [(p.tensors, p.every) for p in settings.looks] == [
        (("input", "grad_output"), 5),
        (("weight",), 4),
        (("grad_weight",), 1),
    ]
    assert set(settings.tensors) == {"input", "weight", "grad_output", "grad_weight"}
    assert (settings.recipes, settings.sample) == (("mxfp8", "blockwise"), 1)
    assert [(p.tensors, p.every) for p in settings.dump.periods] == [(("input",), 100)]
    assert [(c.action, c.gemms, c.format) for c in settings.interventions] == [
        ("high_precision", ("wgrad",), "E4M3"),
        ("fake", ("dgrad",), "E5M2"),
        ("high_precision", ("fprop", "dgrad", "wgrad"), "E4M3"),
        ("current", ("fprop",), "E4M3"),
    ]
    for part in ("l1_norm: rms times", "operands only, not dgrad", "mxfp8_underflows%_columnwise"):
        assert any(part in note for note in settings.notes), part
    assert WatchConfig.load(settings.to_dict()) == settings  # the manifest makes the same watch again


def test_patches_of_the_diagnosis_are_read() -> None:
    """Every remedy whose patch for TransformerEngine is such a file does here what it does there."""
    values = {"regex": "^layers\\.0\\.fc1$", "gemms": "fprop, wgrad"}
    patches = {name: remedy.patch.get("te", "") for name, remedy in REMEDIES.items()}
    files = {name: patch for name, patch in patches.items() if "layer_name_regex_pattern" in patch}
    assert files
    for name, patch in files.items():
        (change,) = WatchConfig.load(yaml.safe_load(Template(patch).substitute(values))).interventions
        assert change.action == "high_precision", name
        assert matches("layers.0.fc1", change.layers)
        assert not matches("layers.0.fc10", change.layers)


def test_an_unknown_name_does_not_end_the_file() -> None:
    """A feature of one's own, a typo, and statistics that a watch has not are notes; the rest is acted upon."""
    own = {"enabled": True, "tensors": ["weight"]}
    blocks = [{"max_blockwise_dynamic_range": {"block_size": 32, "dims": 1}}, "std", "min", "nobody"]
    settings = WatchConfig.load(
        config({"layer_types": ["a"]}, MyFeature=own, LogTensorStat=own, LogTensorStats={**own, "stats": blocks})
    )
    assert [period.tensors for period in settings.looks] == [("weight",)]
    words = ("unknown feature 'MyFeature'", "did you mean 'LogTensorStats'", "max_blockwise_dynamic_range: dynamic_")
    for part in (*words, "min: amax is that", "no nobody"):
        assert any(part in note for note in settings.notes), part


def test_casts_may_be_structs_in_structs() -> None:
    """GEMMs with tensors of their own, each with a format; the operands of one GEMM are one change."""
    fprop = {"gemm": "fprop", "tensors_struct": [{"tensor": "activation"}, {"tensor": "weight"}]}
    dgrad = {"gemm": "dgrad", "tensors": ["weight", "gradient"], "quant_format": "FP8E4M3"}
    current = {"enabled": True, "gemms_struct": [fprop, {"gemm": "wgrad", "tensors_struct": [{"tensor": "gradient"}]}]}
    formats = [{"tensor": name, "quant_format": "FP8E4M3"} for name in ("activation", "weight")]
    fake = {"enabled": True, "gemms": ["fprop"], "tensors_struct": formats}
    settings = WatchConfig.load(config({"layer_types": ["a"]}, PerTensorScaling=current, FakeQuant=fake))
    assert [(c.action, c.gemms, c.tensors) for c in settings.interventions] == [
        ("current", ("fprop",), ("input",)),
        ("current", ("fprop",), ("weight",)),
        ("current", ("wgrad",), ("grad_output",)),
        ("fake", ("fprop",), ("input", "weight")),
    ]
    (only,) = WatchConfig.load(
        config({"layer_types": ["a"]}, FakeQuant={"enabled": True, "gemms_struct": [dgrad]})
    ).interventions
    assert (only.format, only.tensors) == ("E4M3", ("weight", "grad_output"))
    recipe = get_recipe("tensorwise")
    for change in (*settings.interventions, only):
        recipe = changed(recipe, change)
    assert (str(recipe.fprop), str(recipe.dgrad)) == (
        "E4M3[tensor] x E4M3[tensor] in BF16",
        "E4M3[tensor] x E4M3[tensor] in BF16",
    )


def test_mistakes_are_named() -> None:
    for tree, message in (
        (config({"layer": ["fc1"]}, **statistics()), "needs one of layer_name_regex_pattern"),
        (config({"layer_types": ["a"], "layer_nums": 1}, **statistics()), "layer_nums"),
        (config({"layer_numbers": ["a-b"]}, **statistics()), "ranges as 0-3"),
        (config({"layer_numbers": ["0-999999999"]}, **statistics()), "numbers below 10,000"),
        (config({"layer_types": 5}, **statistics()), "layer_types: got 5; needs a name or a list"),
        (config({"exact_layer_names": 5}, **statistics()), "exact_layer_names: got 5; needs a name or a list"),
        ({"stats": {"enabled": True, "layers": {"layer_types": ["a"]}, "transformer_engine": ["a"]}}, "of features"),
        (config({"layer_types": ["a"]}, **statistics(tensors=["activations"])), "did you mean 'activation'"),
        (config({"layer_types": ["a"]}, **statistics(tensors=None)), "needs a name or a list"),
        (config({"layer_types": ["a"]}, **statistics(freq="often")), "freq: got 'often'; needs a whole number"),
        (config({"layer_types": ["a"]}, **statistics(start_end_list=[3])), "needs a list of"),
        (config({"layer_name_regex_pattern": "("}, **statistics()), "no regular expression"),
        (config({"layer_types": ["a"]}, FakeQuant={"enabled": "yes"}), "needs true or false"),
        (config({"layer_types": ["a"]}, **statistics(freq=-1)), "every"),
    ):
        with pytest.raises(ConfigError, match=message):
            WatchConfig.load(tree)
    one_name = read_te_config(config({"layer_types": "fc1"}, **statistics()))
    assert one_name["looks"][0]["layers"] == ["re:fc1"]  # not its letters
    assert read_te_config({}) == {"looks": [], "sample": 1, "notes": []}
    assert Period(every=3).chooses(9)
