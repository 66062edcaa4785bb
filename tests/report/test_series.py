"""Tables and curves of statistics: the numbers of the run, the filters, and good beside bad."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import ottava
from ottava.measure.walk import measure
from ottava.record.reader import COLUMNS, Run, select, step_range, tensor_table
from ottava.record.schema import RunError, SlotKey
from ottava.record.writer import RunWriter
from ottava.report.grid import curves
from ottava.train.config import TrainConfig
from ottava.train.run_folder import RunFolder

KEY = SlotKey("0.fc1", "input", "row", "delayed", "E4M3", "tensor", "fp32", "delayed", "door")
SPEC = ottava.QuantizationSpec(ottava.E4M3, scaling="delayed")


def recorded(path: Path, growth: float) -> Run:
    """Two layers and two tensors, looked at in four steps, with the scale of the step before."""
    torch.manual_seed(0)
    with RunWriter(path) as writer:
        for step in (1, 2, 4, 8):
            for layer in ("0.fc1", "0.fc2"):
                for tensor in ("input", "weight"):
                    x = torch.randn(64, 128) * (growth**step if layer == "0.fc2" else 1.0)
                    scale = 448 / (x.abs().amax() / growth)
                    tally = measure(x, ottava.quantize(x, SPEC, scale=scale))
                    writer.tally(step, KEY._replace(layer=layer, tensor=tensor), tally)
    return Run.open(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return recorded(tmp_path_factory.mktemp("series") / "run", 2.0)


def test_a_line_for_each_tensor_and_step_with_the_numbers_of_plain_torch(run: Run) -> None:
    """The witness computes every column from the tensors themselves."""
    rows = tensor_table(select(run)).to_pylist()
    assert [row["step"] for row in rows] == [1] * 4 + [2] * 4 + [4] * 4 + [8] * 4
    assert list(rows[0]) == ["step", "layer", "tensor", "recipe", "format", *COLUMNS]
    torch.manual_seed(0)
    for row in rows:
        x = torch.randn(64, 128) * (2.0 ** row["step"] if row["layer"] == "0.fc2" else 1.0)
        scale = (448 / (x.abs().amax() / 2.0)).double()
        q = (x.double() * scale).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() / scale
        error = x.double() - q
        wanted = {
            "amin": x[x != 0].abs().min(),
            "amax": x.abs().max(),
            "scale_current": 448 / x.abs().max(),
            "scale_delayed": scale,
            "cosine": torch.nn.functional.cosine_similarity(x.double().flatten(), q.flatten(), dim=0),
            "mse": error.square().mean(),
            "underflow_pct": 100 * ((q == 0) & (x != 0)).double().sum() / (x != 0).sum(),
            "overflow_pct": 100 * (x.double().abs() * scale > 464).double().mean(),
        }
        for name, value in wanted.items():
            assert row[name] == pytest.approx(float(value), rel=1e-6), name


def test_filters(run: Run) -> None:
    """Patterns, regular expressions, symbols and ranges of steps."""
    assert set(select(run, layers=["*.fc2"])["layer"]) == {"0.fc2"}
    assert set(select(run, layers=[r"re:fc[1]$"])["layer"]) == {"0.fc1"}
    assert set(select(run, tensors=["W"])["tensor"]) == {"weight"}
    assert set(select(run, steps="2:4")["step"]) == {2, 4}
    assert set(select(run, steps="8")["step"]) == {8}
    with pytest.raises(RunError, match=r"matches no layer; it has 0\.fc1, 0\.fc2"):
        select(run, layers=["fc9"])
    with pytest.raises(RunError, match="no look at these tensors in steps 100:"):
        select(run, steps="100:")
    with pytest.raises(ValueError, match="no regular expression"):
        select(run, layers=["re:(["])
    with pytest.raises(ValueError, match="tensor 'Z'"):
        select(run, tensors=["Z"])
    for wrong in ("a:b", "9:2"):
        with pytest.raises(ValueError, match="steps"):
            step_range(wrong)
    with pytest.raises(ValueError, match="did you mean 'cosine'"):
        tensor_table(select(run), ["cosin"])


def test_a_run_without_looks_says_why(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "empty") as writer:
        writer.step(1, loss=2.0)
    with pytest.raises(RunError, match="no step had a full look"):
        select(Run.open(tmp_path / "empty"))
    trained = RunFolder(tmp_path / "trained", TrainConfig(), resume=False)
    conversion = {"recipe": ottava.RECIPES["tensorwise"].to_dict(), "converted": ["fc1"]}
    trained.begin(0, {"conversion": conversion, "device": "cpu"})
    with pytest.raises(RunError, match=r"nobody watched this run, .*; train again with `ottava train --watch`"):
        select(Run.open(tmp_path / "trained"))


def test_good_and_bad_run_in_one_chart(run: Run, tmp_path: Path) -> None:
    """One colour for a tensor in both runs; the axis is logarithmic where a statistic spans decades."""
    good = recorded(tmp_path / "good", 1.0)
    chart = curves({"bad": select(run, tensors=["X"]), "good": select(good, tensors=["X"])}, "mse")
    lines = {line.name: line for line in chart.lines}
    assert list(lines) == ["0.fc2 X, bad", "0.fc2 X, good", "0.fc1 X, bad", "0.fc1 X, good"]
    assert chart.log
    for tensor in ("0.fc1 X", "0.fc2 X"):
        assert lines[f"{tensor}, bad"].style == lines[f"{tensor}, good"].style
        assert [lines[f"{tensor}, {name}"].dashed for name in ("bad", "good")] == [False, True]
    table = select(run, layers=["0.fc2"], tensors=["X"])
    assert np.array_equal([y for _, y in lines["0.fc2 X, bad"].points], table.metric("mse"))
    assert not curves({"bad": select(run)}, "underflow_pct").log
    alone = curves({"bad": select(run)}, "cosine")  # low is worse
    assert alone.lines[0].style == 1
    lowest = min(y for line in alone.lines for _, y in line.points if math.isfinite(y))
    assert lowest in [y for _, y in alone.lines[0].points]
