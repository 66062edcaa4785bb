"""What importers hand over becomes rows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ottava.interop.importers import IMPORTERS, import_run
from ottava.interop.importers.collected import NO_SQNR, Cast, Collected, ImportRunError, Place, spec_of
from ottava.record.reader import Run
from ottava.record.schema import RunError
from ottava.record.writer import RunWriter

PLACE = Place(5, 0, "layers.0.fc1", "input")


def written(collected: Collected, tmp_path: Path) -> Run:
    collected.kinds["te_log"] = 1
    collected.write(tmp_path, tmp_path / "run")
    return Run.open(tmp_path / "run")


def test_power_gives_rms_sqnr_and_outliers(tmp_path: Path) -> None:
    """From var + mean**2; a ratio is left out where its mse is mostly rounding."""
    collected = Collected()
    collected.of_tensor(PLACE, {"std": 3.0, "mean": 4.0, "amax": 50.0})
    collected.of_cast(PLACE, Cast(None, "row"), {"mse": 0.25})
    collected.of_cast(PLACE, Cast("mxfp8", "row"), {"mse": 0.25, NO_SQNR: 1.0})
    first, second = written(collected, tmp_path).table().dicts("rms", "sqnr_db", "outlier_ratio", "mse")
    assert (first["rms"], first["sqnr_db"], first["outlier_ratio"]) == pytest.approx((5.0, 20.0, 10.0))
    assert math.isnan(second["sqnr_db"])
    assert second["mse"] == 0.25


@pytest.mark.parametrize(
    "recipe, tensor, text",
    [("delayed", "grad_output", "E5M2[tensor, delayed]"), ("blockwise", "weight", "E4M3[128x128, pow2]")],
)
def test_recipes_say_how_a_tensor_is_cast(recipe: str, tensor: str, text: str) -> None:
    assert str(spec_of(recipe, tensor)) == text


@pytest.mark.parametrize(
    "recipe, tensor", [(None, "input"), ("nobody's", "input"), ("bf16", "input"), ("mxfp8", "output")]
)
def test_what_is_not_known_is_none(recipe: str | None, tensor: str) -> None:
    assert spec_of(recipe, tensor) is None


def test_an_empty_folder_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    """Every kind is named; so is a wrong kind, and a source that is not there."""
    with pytest.raises(ImportRunError) as caught:
        import_run(tmp_path, tmp_path / "run")
    assert all(name in str(caught.value) for name in IMPORTERS)
    with pytest.raises(ImportRunError, match="did you mean 'te_log'"):
        import_run(tmp_path, tmp_path / "run", kind="te_logs")
    with pytest.raises(ImportRunError, match="does not exist"):
        import_run(tmp_path / "no", tmp_path / "run")


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    """The target must be new."""
    RunWriter(tmp_path / "run").close()
    log = tmp_path / "a_globalrank-0.log"
    log.write_text("x_weight_std iteration=000001 value=1.0\n", encoding="utf-8")
    with pytest.raises(RunError, match="is not empty; give a new folder"):
        import_run(log, tmp_path / "run")
