"""Patches: ottava's run as they are printed, and every one names the right layers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml

import ottava
from ottava.debug.analysis.facts import context_of
from ottava.debug.analysis.patches import patterns, render
from ottava.debug.analysis.rules import load_rules
from ottava.debug.measure import measure
from ottava.debug.run.reader import Run
from ottava.debug.run.schema import SlotKey
from ottava.debug.run.writer import RunWriter

BOOK = load_rules()
LAYERS = [f"layers.{i}.mlp.{name}" for i in range(5) for name in ("up_proj", "down_proj")]


def model() -> torch.nn.Module:
    """With exactly LAYERS."""
    root = torch.nn.Module()
    for layer in LAYERS:
        owner: torch.nn.Module = root
        *path, last = layer.split(".")
        for part in path:
            if not hasattr(owner, part):
                setattr(owner, part, torch.nn.Module())
            owner = getattr(owner, part)
        setattr(owner, last, torch.nn.Linear(64, 64))
    return root


@pytest.fixture
def run(tmp_path: Path) -> Run:
    spec = ottava.QuantizationSpec(ottava.E4M3, scaling="delayed")
    x = torch.randn(8, 16)
    with RunWriter(tmp_path / "run") as writer:
        writer.describe(config={"optimizer_cpu_offload": True})
        for layer in LAYERS:
            key = SlotKey(layer, "input", "row", "delayed", "E4M3", "tensor", "fp32", "delayed", "door")
            writer.tally(1, key, measure(x, ottava.quantize(x, spec)))
    return Run.open(tmp_path / "run")


@pytest.mark.parametrize("name", [n for n, r in BOOK.remedies.items() if "recipe = " in r.patch.get("ottava", "")])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise", "mxfp8"])
def test_recipes_of_ottava_can_be_pasted(run: Run, name: str, recipe: str) -> None:
    """The printed lines make a Recipe that a model takes."""
    found = render(BOOK.remedies[name], context_of(run), id="N1", layers=LAYERS[:1], tensor="input", recipe=recipe)
    scope: dict[str, object] = {"ottava": ottava}
    exec(found["patch"]["ottava"], scope)
    ottava.convert(model(), scope["recipe"])  # type: ignore[arg-type]


def test_an_operand_in_bf16_turns_off_the_gemms_that_read_it(run: Run) -> None:
    remedy, context = BOOK.remedies["bf16_operand"], context_of(run)
    found = render(remedy, context, id="N1", layers=LAYERS[1:2], tensor="input", recipe="tensorwise")
    scope: dict[str, object] = {"ottava": ottava}
    exec(found["patch"]["ottava"], scope)
    resolved = scope["recipe"].for_layer("layers.0.mlp.down_proj")  # type: ignore[attr-defined]
    assert [resolved.fprop.quantized, resolved.dgrad.quantized, resolved.wgrad.quantized] == [False, True, False]
    assert scope["recipe"].for_layer("layers.1.mlp.down_proj").fprop.quantized  # type: ignore[attr-defined]
    assert found["text"] == "X of these layers in BF16."


def test_transformer_engine_gets_yaml_that_matches_the_layers(run: Run) -> None:
    found = render(
        BOOK.remedies["bf16_operand"],
        context_of(run),
        id="N1",
        layers=LAYERS[1::2],
        tensor="input",
        recipe="tensorwise",
    )
    section = yaml.safe_load(found["patch"]["te"])["ottava_n1"]
    pattern = section["layers"]["layer_name_regex_pattern"]
    assert [layer for layer in LAYERS if re.match(pattern, layer)] == LAYERS[1::2]
    assert section["transformer_engine"]["DisableQuantizationGEMM"]["gemms"] == ["fprop", "wgrad"]


def test_patterns_match_their_layers_and_no_other() -> None:
    from fnmatch import fnmatchcase

    for wanted in (LAYERS[1::2], LAYERS[:1], LAYERS[:6], LAYERS, LAYERS[2:9]):
        found = patterns(wanted, LAYERS)
        assert [x for x in LAYERS if any(fnmatchcase(x, p) for p in found)] == wanted
    assert patterns(LAYERS[1::2], LAYERS) == ["*.mlp.down_proj"]
    assert patterns(["a[0].x"], []) == ["a[[]0].x"]


def test_constraints_are_told_where_they_apply(run: Run, tmp_path: Path) -> None:
    """Megatron: only delayed scaling with offload, no BF16 boundary with delayed; TE: no backward_override."""
    context = context_of(run, config=BOOK.config)
    notes = {
        name: render(BOOK.remedies[name], context, id="x", layers=[], tensor="", recipe="delayed")["notes"]
        for name in ("current_scaling", "boundary_bf16", "wgrad_bf16", "margin")
    }
    assert "offload" in notes["current_scaling"][0]
    assert "--first-last-layers-bf16" in notes["boundary_bf16"][0]
    assert "backward_override" in notes["wgrad_bf16"][0]
    assert notes["margin"] == []
    with RunWriter(tmp_path / "plain") as writer:
        writer.describe(config={})
    plain = context_of(Run.open(tmp_path / "plain"), config=BOOK.config)
    assert render(BOOK.remedies["current_scaling"], plain, id="x", layers=[], tensor="", recipe="")["notes"] == []


def test_no_placeholder_is_left(run: Run) -> None:
    for remedy in BOOK.remedies.values():
        found = render(remedy, context_of(run), id="N1", layers=LAYERS[:2], tensor="input", recipe="strange")
        assert "${" not in found["text"] + "".join(found["patch"].values())
