"""Pictures show the numbers that they are about: asked of the figure's data, and of its colours."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ottava
from ottava.base import plot
from ottava.measure.layer_names import symbol
from ottava.measure.tally import Tally
from ottava.recipe import GEMMS, RECIPES
from ottava.record.reader import Run
from ottava.record.schema import SlotKey
from ottava.record.writer import RunWriter

matplotlib = pytest.importorskip("matplotlib", reason="an extra: pip install 'ottava[plot]'")


def run_of(folder: Path, casts: int = 3, missing: int = 2) -> Run:
    """A run of 4 steps with looks at 1, 2 and 4; cast k loses k of 100 numbers, one cast misses the second."""
    with RunWriter(folder) as writer:
        for step in (1, 2, 3, 4):
            writer.step(step, loss=5.0 - step)
            for cast in range(casts if step != 3 else 0):
                key = SlotKey(f"fc{cast}", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
                if (step, cast) != (2, missing):
                    writer.tally(step, key, Tally(n=100, n_nonzero=100, n_underflow=cast, amax=1.0))
    return Run.open(folder)


def test_a_run_shows_its_loss_and_each_look_at_its_steps(tmp_path: Path) -> None:
    run = run_of(tmp_path / "bad")
    good = run_of(tmp_path / "good")
    figure = run.plot("underflow_pct", beside=good)
    loss, looks = figure.axes[:2]
    assert [line.get_label() for line in loss.lines] == ["bad", "good"]
    assert np.array_equal(loss.lines[0].get_xydata(), np.column_stack([run.steps["step"], run.steps["loss"]]))
    shown = looks.collections[0].get_array()
    assert shown.filled(np.nan).tolist()[:2] == [[0.0] * 3, [1.0] * 3]
    assert shown.mask.tolist() == [[False] * 3, [False] * 3, [False, True, False]]
    assert [label.get_text() for label in looks.get_yticklabels()] == ["fc0 X", "fc1 X", "fc2 X"]
    corners = looks.collections[0].get_coordinates()[0, :, 0].tolist()
    assert corners == [0.5, 1.5, 3.0, 5.0]
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_of_many_casts_the_worst_are_kept_and_that_is_said(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", casts=9, missing=99)
    looks = run.plot("underflow_pct", most=2).axes[1]
    assert [label.get_text() for label in looks.get_yticklabels()] == ["fc7 X", "fc8 X"]
    assert looks.get_title() == "the 2 worst of 9 casts"
    lowest = run.plot("sqnr_db", most=2).axes[1]  # nobody knows it here
    assert lowest.collections[0].get_array().mask.all()
    with pytest.raises(ValueError, match="underflow_pct"):
        run.plot("underflow")


def test_an_observation_shows_every_cast_at_its_layer_and_tensor() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)).bfloat16()
    ottava.convert(model, "blockwise")
    with ottava.debug.observe(model) as seen:
        model(torch.randn(64, 64, dtype=torch.bfloat16)).square().mean().backward()
    axes = seen.plot("row_sqnr_p50_db").axes[0]
    shown = axes.collections[0].get_array()
    layers, tensors = ([t.get_text() for t in labels] for labels in (axes.get_yticklabels(), axes.get_xticklabels()))
    assert layers == ["0", "2"]
    for row in seen.table():
        place = layers.index(row["layer"]), tensors.index(symbol(row["tensor"], row["direction"]))
        assert shown[place] == row["row_sqnr_p50_db"]
    assert shown.count() == len(seen.table())
    assert axes.collections[0].get_clim() == (0.0, max(40.0, shown.max()))  # a dB more or less is no other colour
    with pytest.raises(ValueError, match="sqnr_db"):
        seen.plot("sqnr")
    with pytest.raises(ValueError, match="no casts were seen"):
        type(seen)().plot()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_shows_its_six_cells(name: str) -> None:
    recipe = RECIPES[name]
    axes = recipe.plot().axes[0]
    texts = [text.get_text().replace("\n", " ") for text in axes.texts]
    specs = [getattr(getattr(recipe, gemm), side) for gemm in GEMMS for side in ("lhs", "rhs")]
    assert texts == [str(spec or "high precision") for spec in specs]
    faces = [matplotlib.colors.to_hex(patch.get_facecolor()) for patch in axes.patches]
    assert faces == [plot.BITS[16 if spec is None else spec.format.bits] for spec in specs]


def contrast(one: str, other: str) -> float:
    """WCAG's ratio of two colours."""

    def luminance(color: str) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in matplotlib.colors.to_rgb(color)]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_colours_can_be_read_on_a_white_and_on_a_dark_page(tmp_path: Path) -> None:
    for page in ("#ffffff", "#131416"):
        assert contrast(plot.INK, page) > 4.1
        assert all(contrast(line, page) > 3 for line in plot.LINES)
    assert all(contrast("black", face) > 7 for face in plot.BITS.values())
    figure = run_of(tmp_path / "run").plot()
    assert figure.get_facecolor()[3] == 0
    assert all(axes.get_facecolor()[3] == 0 for axes in figure.axes[:2])
    named = {axes.xaxis.label.get_color() for axes in figure.axes[1:2]} | {
        axes.yaxis.label.get_color() for axes in figure.axes[:1]
    }
    assert named == {plot.INK}


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError("no matplotlib")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'ottava\[plot\]'"):
        RECIPES["mxfp8"].plot()
