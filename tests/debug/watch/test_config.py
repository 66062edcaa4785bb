"""Settings of a watch: every default is usable, every mistake is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ottava
from ottava.debug.tally import DETAILS, Detail
from ottava.debug.watch.config import Triggers, WatchConfig, WatchConfigError, matches, tensor_names


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    """And so is no file."""
    (tmp_path / "watch.yaml").write_text("")
    assert WatchConfig.load(tmp_path / "watch.yaml") == WatchConfig.load(None) == WatchConfig.load({}) == WatchConfig()


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


@pytest.mark.parametrize("detail", DETAILS)
def test_every_detail_is_a_setting(detail: Detail) -> None:
    assert WatchConfig.load({"detail": detail}).detail == detail
    with pytest.raises(WatchConfigError, match=f"unknown value of detail '{detail}x'.*{detail}"):
        WatchConfig.load({"detail": f"{detail}x"})


def test_to_dict_and_load_are_inverse() -> None:
    """What the manifest holds makes the same watch again."""
    config = WatchConfig(layers=("a", "b*"), tensors=("dY",), recipes=("mxfp8", "delayed"), every=3)
    assert WatchConfig.load(config.to_dict()) == config


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"tensors": ("Z",)}, "unknown tensor 'Z'"),
        ({"tensors": ("inputs",)}, "did you mean 'input'"),
        ({"every": 0}, "every is 0; needs a whole number of at least 1"),
        ({"sample": 0.5}, "sample is 0.5"),
        ({"compiled": "egaer"}, "did you mean 'eager'"),
        ({"loss": "total"}, "known: mean, sum"),
        ({"layers": ()}, "layers is empty"),
        ({"recipes": ("blokwise",)}, "did you mean 'blockwise'"),
        ({"dump": {"tensors": ["Q"]}}, "unknown tensor 'Q'"),
    ],
)
def test_a_wrong_value_is_named(settings: dict[str, Any], said: str) -> None:
    """What was got, and what there is."""
    with pytest.raises(ValueError, match=said):
        WatchConfig(**settings)


@pytest.mark.parametrize("settings", [{"evry": 5}, {"triggers": {"loss_zz": 1}}, {"dump": {"quota": 1}}])
def test_an_unknown_field_is_refused(settings: dict[str, Any]) -> None:
    """With the nearest known one."""
    with pytest.raises(TypeError, match="did you mean"):
        WatchConfig(**settings)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    """Missing, or no mapping."""
    with pytest.raises(WatchConfigError, match="cannot read"):
        WatchConfig.load(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(WatchConfigError, match="needs a mapping"):
        WatchConfig.load(tmp_path / "list.yaml")


def test_recipes_of_your_own_are_taken() -> None:
    """Not only names."""
    own = ottava.RECIPES["tensorwise"].override("*.fc2", "bf16")
    assert WatchConfig(recipes=own).recipes == (own,)


def test_patterns_and_symbols() -> None:
    """Shell patterns over full names; both vocabularies of tensors."""
    assert matches("blocks.3.fc2", ("*.fc2",))
    assert not matches("blocks.3.fc2", ("fc2",))
    assert tensor_names(("X", "W", "dY", "Y", "dX", "dW")) == (
        "input",
        "weight",
        "grad_output",
        "output",
        "grad_input",
        "grad_weight",
    )
