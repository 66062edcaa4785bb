"""Settings of a watch: every default is usable, every mistake is named."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

import ottava
from ottava.base.settings import ConfigError
from ottava.measure.layer_names import matches, tensor_names
from ottava.watching.config import Triggers, WatchConfig


def test_yaml_gives_what_it_says(tmp_path: Path) -> None:
    """Nested parts and single names in place of lists; keywords have the last word."""
    text = (
        "layers: 'blocks.*'\ntensors: [X, grad_output]\nrecipes: blockwise\nevery: 7\ntriggers: {loss_z: null}\n"
        "dump: {steps: [3], layers: '*.fc2', tensors: X}\n"
    )
    (tmp_path / "watch.yaml").write_text(text)
    config = WatchConfig.load(str(tmp_path / "watch.yaml"), every=9)
    assert (config.layers, config.tensors, config.recipes, config.every) == (
        ("blocks.*",),
        ("input", "grad_output"),
        ("blockwise",),
        9,
    )
    assert config.triggers == Triggers(loss_z=None)
    assert (config.dump.steps, config.dump.layers, config.dump.tensors) == ((3,), ("*.fc2",), ("input",))


def test_to_dict_and_load_are_inverse() -> None:
    """What the manifest holds makes the same watch again."""
    config = WatchConfig(layers=("a", "b*"), tensors=("dY",), recipes=("mxfp8", "delayed"), every=3)
    assert WatchConfig.load(config.to_dict()) == config


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"tensors": ("Z",)}, "unknown tensor 'Z'"),
        ({"tensors": ("inputs",)}, "did you mean 'input'"),
        ({"every": 0}, "^every: got 0; input should be greater than or equal to 1$"),
        ({"sample": 0.5}, "^sample: got 0.5; input should be a valid integer"),
        ({"compiled": "egaer"}, "^compiled: got 'egaer'; input should be 'warn' or 'eager'"),
        ({"loss": "total"}, "^loss: got 'total'; input should be 'auto', 'mean' or 'sum'"),
        ({"layers": ()}, "^layers: got .*at least 1 item"),
        ({"triggers": 5}, "^triggers: got 5; input should be"),
        ({"dump": 5}, "^dump: got 5; input should be"),
        ({"dump": {"steps": [3, "soon"], "rows": -1}}, "^dump.steps.1: got 'soon'.*\ndump.rows: got -1; "),
        ({"dump": {"quota_gb": math.inf}}, "^dump.quota_gb: got inf; "),
        ({"triggers": {"loss_z": math.nan}}, "^triggers.loss_z: got nan; "),
        ({"triggers": {"burst": 10**30}}, "^triggers.burst: got 10+; "),
        ({"flight": 10**12}, "^flight: got 10+; input should be less than or equal to 65536"),
        ({"every": 10**5000}, "^every: got a int of very many digits; "),
        ({"layers": [5]}, "^layers.0: got 5; input should be a valid string"),
        ({"layers": "a" * 300, "tensors": 5}, "^tensors: got 5; "),
        ({"recipes": [5]}, "^recipes.0: recipe: got int; needs a Recipe or the name of one"),
        ({"sinks": 5}, "^sinks: got 5; "),
        ({"recipes": ("blokwise",)}, "did you mean 'blockwise'"),
        ({"dump": {"tensors": ["Q"]}}, "unknown tensor 'Q'"),
    ],
)
def test_a_wrong_value_is_named(settings: dict[str, Any], said: str) -> None:
    """What was got, and what there is."""
    with pytest.raises(ConfigError, match=said):
        WatchConfig(**settings)


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"evry": 5}, "unknown setting 'evry'; did you mean 'every'?"),
        ({"triggers": {"loss_zz": 1}}, "unknown setting 'triggers.loss_zz'; did you mean 'triggers.loss_z'?"),
        ({"dump": {"quota": 1}}, "unknown setting 'dump.quota'; did you mean 'dump.quota_gb'?"),
    ],
)
def test_an_unknown_field_is_refused(settings: dict[str, Any], said: str) -> None:
    """With the nearest known one, also in a constructor."""
    with pytest.raises(ConfigError, match=re.escape(said)):
        WatchConfig(**settings)


def test_a_file_names_itself(tmp_path: Path) -> None:
    """Missing, no mapping, or with a wrong value; what is given beside it has the last word. No settings at all: 5."""
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read"):
        WatchConfig.load(tmp_path / "none.yaml")
    file = tmp_path / "watch.yaml"
    for text, said in (("- 1\n", "got a YAML list"), ("every: 0\n", "every: got 0"), ("every: [[", "is no YAML")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"watch.yaml: {re.escape(said)}"):
            WatchConfig.load(file)
    with pytest.raises(ConfigError, match="got int; needs a mapping"):
        WatchConfig.load(5)  # type: ignore[arg-type]
    assert WatchConfig.load(WatchConfig(every=3, sample=2), every=4) == WatchConfig(every=4, sample=2)


def test_recipes_of_your_own_are_taken() -> None:
    """Not only names."""
    own = ottava.RECIPES["tensorwise"].override("*.fc2", "bf16")
    assert WatchConfig(recipes=own).recipes == (own,)


def test_patterns_and_symbols() -> None:
    """Shell patterns over full names; both vocabularies of tensors."""
    assert matches("blocks.3.fc2", ("*.fc2",))
    assert not matches("blocks.3.fc2", ("fc2",))
    assert matches("blocks.3.fc2", (r"re:^blocks\.[0-3]\.", "other"))
    assert not matches("blocks.4.fc2", (r"re:^blocks\.[0-3]\.",))
    with pytest.raises(ConfigError, match="its first step is behind its last"):
        WatchConfig.load({"looks": [{"ranges": [[5, 1]]}]})
    with pytest.raises(ConfigError, match="no regular expression"):
        WatchConfig(layers=["re:("])
    assert tensor_names(("X", "W", "dY", "Y", "dX", "dW")) == (
        "input",
        "weight",
        "grad_output",
        "output",
        "grad_input",
        "grad_weight",
    )
