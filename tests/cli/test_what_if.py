"""`ottava what-if` on a recorded run."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

import command
import ottava
from ottava.measure.walk import measure, measure_packed
from ottava.record.reader import Run
from ottava.record.schema import RunError, SlotKey
from ottava.record.writer import RunWriter

run = partial(command.run, "what-if")


@pytest.fixture
def watched(tmp_path: Path) -> Path:
    """Two layers; massive tokens enter the second."""
    torch.manual_seed(0)
    with RunWriter(tmp_path) as writer:
        for layer, tokens in (("layers.0.mlp.up_proj", 1.0), ("layers.0.mlp.down_proj", 1e5)):
            x = torch.randn(128, 256)
            x[:2] *= tokens
            key = SlotKey(layer, "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
            writer.tally(3, key, measure(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3))))
    return tmp_path


def test_prints_recipes_and_the_cheapest(watched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(watched) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.partition("\n\n")[2].partition("\n\n")[0].splitlines())
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert " 1/2 " in lines["tensorwise"]
    assert "0.mlp.down_proj X" in lines["tensorwise"]
    assert " 2/2 " in lines["rowwise_with_gw_hp"]
    assert lines["rowwise_with_gw_hp:"].split(": ")[1] == "layers.0.mlp.down_proj"
    assert lines["delayed:"].split(": ")[1] == "layers.0.mlp.up_proj"


def test_layers_show_every_tensor(watched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(watched, "--layers", "*.down_proj", "--recipes", "tensorwise,mxfp8") == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("layers.0.mlp.down_proj")]
    assert len(rows) == 4  # two recipes, X and X.T
    assert "underflow of" in rows[0]
    assert rows[1].endswith("ok")
    assert rows[3].endswith("the run has no cast of x.T")


def test_json_is_one_object(watched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(watched, "--recipes", "tensorwise", "--json") == 1
    values = json.loads(capsys.readouterr().out)
    assert values["cheapest"] == {"layers.0.mlp.up_proj": "tensorwise", "layers.0.mlp.down_proj": None}
    assert {p["layer"] for p in values["predictions"]} == set(values["cheapest"])


def test_bad_input(watched: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="matches no layer"):
        run(watched, "--layers", "lm_head")
    with pytest.raises(ValueError, match="tensorwise"):
        run(watched, "--recipes", "tensorwize")
    RunWriter(tmp_path / "empty").close()
    with pytest.raises(RunError, match="no histograms"):
        run(tmp_path / "empty")


def test_numbers_alone_are_said_to_be_too_little(watched: Path, tmp_path: Path) -> None:
    x = torch.randn(64, 64)
    key = Run.open(watched).table().slots()[0]
    tally = measure_packed(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3)), detail="numbers").tally()
    with RunWriter(tmp_path / "numbers") as writer:
        writer.tally(1, key, tally)
    with pytest.raises(RunError, match='this run was watched with detail="numbers"; watch with detail="blocks"'):
        run(tmp_path / "numbers")
