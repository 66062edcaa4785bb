"""Statistics logs of TransformerEngine: lines in its own form, every name it can write, nan and inf, several ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ottava.interop.importers import IMPORTERS, import_run
from ottava.interop.importers.collected import Cast, ImportRunError
from ottava.interop.importers.scalars import parse_name
from ottava.interop.te_config import RECIPES_OF_TE, TENSORS
from ottava.record.reader import Run


def line(name: str, step: int, value: float) -> str:
    """As nvdlfw_inspect's FileLogger formats it (logging.py: formatter of the file handler, log_scalar)."""
    message = "{} \t\t\t\t iteration={:06d} \t\t\t\t value={:.4f}".format(name, step, value)  # noqa: UP032 - its own words
    return f"2025-11-03 10:15:01,123 - INFO - {message}\n"


def a_log(folder: Path, lines: list[str], rank: int = 0) -> Path:
    """In the place where BioNeMo's recipes put it."""
    path = folder / f"rank_{rank}" / "nvdlfw_inspect_statistics_logs" / f"nvdlfw_inspect_globalrank-{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")
    return path


FC2 = "model.esm.encoder.layers.33.layernorm_mlp.fc2"


def imported(tmp_path: Path, *lines: str, recipe: str | None = None) -> Run:
    a_log(tmp_path / "logs", list(lines))
    return import_run(tmp_path / "logs", tmp_path / "run", recipe=recipe)


def test_statistics_of_one_tensor_are_one_row(tmp_path: Path) -> None:
    """And what follows from them: amax of min and max, SQNR of mse and std, scales of their inverses."""
    stats = {"min": -4.5, "max": 3.0, "mean": 0.5, "std": 2.0, "dynamic_range": 20.5}
    stats |= {"underflows%": 0.25, "overflows%": 0.5, "mse": 0.0425, "scale_inv_min": 0.25, "scale_inv_max": 0.5}
    run = imported(tmp_path, *(line(f"{FC2}_activation_{name}", 100, value) for name, value in stats.items()))
    (row,) = run.table().dicts()
    wanted = {"amax": 4.5, "mean": 0.5, "std": 2.0, "dynamic_range_bits": 20.5, "overflow_pct": 0.5, "mse": 0.0425}
    wanted |= {"scale_max": 4.0, "scale_min": 2.0, "rms": math.sqrt(4.25), "sqnr_db": 20.0}
    wanted |= {"outlier_ratio": 4.5 / math.sqrt(4.25), "underflow_pct": 0.25}
    assert {name: row[name] for name in wanted} == pytest.approx(wanted, rel=1e-12)


def test_casts_that_were_tried_beside_are_rows_of_their_own(tmp_path: Path) -> None:
    """A recipe before the statistic, _columnwise after it; amax belongs to all of them."""
    run = imported(
        tmp_path,
        line(f"{FC2}_activation_cur_amax", 5, 8.0),
        line(f"{FC2}_activation_underflows%", 5, 60.0),
        line(f"{FC2}_activation_fp8_block_scaling_underflows%", 5, 0.5),
        line(f"{FC2}_activation_mxfp8_underflows%_columnwise", 5, 0.25),
        recipe="delayed",
    )
    rows = {(r["recipe"], r["direction"]): r for r in run.table().dicts("underflow_pct", "amax")}
    assert {key: (row["underflow_pct"], row["amax"]) for key, row in rows.items()} == {
        ("delayed", "row"): (60.0, 8.0),
        ("blockwise", "row"): (0.5, 8.0),
        ("mxfp8", "col"): (0.25, 8.0),
    }
    assert (rows["delayed", "row"]["format"], rows["delayed", "row"]["scaling"]) == ("E4M3", "delayed")
    assert rows["mxfp8", "col"]["granularity"] == "1x32"


@pytest.mark.parametrize("theirs, ours", RECIPES_OF_TE.items())
@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("layer", ["decoder.0.mlp.fc1", "a_weight_b.qkv", "transformer_layer.self_attention"])
def test_every_name_is_understood(theirs: str, ours: str, tensor: str, layer: str) -> None:
    """Also of a layer whose own name has a tensor's word in it."""
    for statistic in ("underflows%", "mse", "scale_inv_min"):
        for direction, end in (("row", ""), ("col", "_columnwise")):
            named = parse_name(f"{layer}_{tensor}_{theirs}_{statistic}{end}")
            assert named == (layer, TENSORS[tensor], Cast(ours, direction), statistic)


def test_nan_and_inf_lines_are_kept(tmp_path: Path) -> None:
    """They are what one looks for; a regular expression for digits would drop them."""
    run = imported(
        tmp_path,
        line(f"{FC2}_activation_cur_amax", 7, math.inf),
        line(f"{FC2}_activation_std", 7, math.nan),
        line(f"{FC2}_activation_mse", 7, math.nan),
        line(f"{FC2}_activation_mse", 8, 2.0),
    )
    first, second = run.table().dicts("amax", "std", "mse", "nonfinite")
    assert (first["amax"], first["nonfinite"]) == (math.inf, 1)
    assert math.isnan(first["std"])
    assert math.isnan(first["mse"])
    assert second["mse"] == 2.0


def test_digits_that_the_log_lost_are_not_believed(tmp_path: Path) -> None:
    """mse 3e-6 is written as 0.0000: no mse, no infinite SQNR; one of 0.0002 is given, but no ratio of it."""
    run = imported(
        tmp_path,
        *(line(f"{FC2}_activation_{n}", 7, v) for n, v in (("mse", 3e-6), ("std", 1.0), ("mean", 0.0))),
        *(line(f"{FC2}_activation_{n}", 8, v) for n, v in (("mse", 2e-4), ("std", 1.0), ("mean", 0.0))),
        line(f"{FC2}_activation_underflows%", 7, 0.0),
    )
    first, second = run.table().dicts("mse", "sqnr_db", "rms", "underflow_pct")
    assert math.isnan(first["mse"])
    assert math.isnan(first["sqnr_db"])
    assert (first["rms"], first["underflow_pct"]) == (1.0, 0.0)
    assert second["mse"] == 2e-4
    assert math.isnan(second["sqnr_db"])
    assert any("0.0000" in note for note in run.manifest["imported"]["notes"])


def test_a_missing_amax_is_missing(tmp_path: Path) -> None:
    """A log with no amax, with a maximum but no minimum, or with an amax whose digits are lost: NaN, never 0."""
    logged = {1: {"std": 1.0}, 2: {"max": 3.0}, 3: {"cur_amax": 1e-6}, 4: {"max": 3.0, "min": 0.0}}
    lines = [
        line(f"{FC2}_activation_{name}", step, value)
        for step, one in logged.items()
        for name, value in (*one.items(), ("underflows%", 0.5))
    ]
    rows = imported(tmp_path, *lines).table().dicts("amax", "outlier_ratio")
    assert [math.isnan(row["amax"]) for row in rows] == [True, True, True, False]
    assert rows[3]["amax"] == 3.0
    assert all(math.isnan(row["outlier_ratio"]) for row in rows)


def test_ranks_are_files_and_the_worst_one_counts(tmp_path: Path) -> None:
    """BioNeMo's folders: rank_N/nvdlfw_inspect_statistics_logs."""
    for rank, value in enumerate((0.5, 30.0, 1.0)):
        a_log(tmp_path / "logs", [line(f"{FC2}_gradient_underflows%", 100, value)], rank)
    run = import_run(tmp_path / "logs", tmp_path / "run")
    assert run.ranks == [0, 1, 2]
    assert run.table().metric("underflow_pct").tolist() == [30.0]
    assert sorted(run.table(merge_ranks=False).metric("underflow_pct")) == [0.5, 1.0, 30.0]


def test_what_is_not_understood_is_counted_and_said(tmp_path: Path) -> None:
    """A statistic without a counterpart, a value that is no number, other lines; settings beside the logs are kept."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "fp8_stats.yaml").write_text("a:\n  enabled: true\n  layers: [1]\n", encoding="utf-8")
    run = imported(
        tmp_path,
        "2025-11-03 10:15:01,123 - INFO - Feature=LogTensorStats, API=inspect_tensor: activation\n",
        line(f"{FC2}_activation_max_blockwise_4_dynamic_range", 1, 3.0),
        line(f"{FC2}_activation_l1_norm", 1, 3.0),
        line("loss", 1, 3.0),
        f"x - INFO - {FC2}_activation_std iteration=000001 value=tensor(1.)\n",
        line(f"{FC2}_activation_std", 1, 3.0)[:-9],
        line(f"{FC2}_activation_cur_amax", 1, 3.0),
    )
    facts = run.manifest["imported"]
    assert set(facts["not_understood"]) == {"max_blockwise_4_dynamic_range", "l1_norm", "loss", "value tensor(1.)"}
    assert facts["files"] == {"te_log": 1}
    assert run.manifest["config"] == {"a.enabled": True, "a.layers": "[1]"}
    assert len(run.table()) == 1


def test_a_log_without_statistics_is_refused(tmp_path: Path) -> None:
    """Saying what was in it."""
    a_log(tmp_path / "logs", ["2025-11-03 - INFO - Assigned layer name: model.fc1\n", line("foo", 1, 2.0)])
    with pytest.raises(ImportRunError, match=r"understood no value.*foo \(1x\)"):
        import_run(tmp_path / "logs", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_logs_are_found_by_their_name(tmp_path: Path) -> None:
    """A single file may have any."""
    path = a_log(tmp_path, [line(f"{FC2}_activation_std", 1, 3.0)])
    (tmp_path / "train.log").write_text("loss 3", encoding="utf-8")
    find = IMPORTERS["te_log"].find
    assert find(tmp_path) == [path]
    renamed = path.rename(tmp_path / "stats.txt")
    assert find(renamed) == [renamed]
    assert len(import_run(renamed, tmp_path / "run").table()) == 1


def test_a_bad_run_is_told_from_a_good_one(tmp_path: Path) -> None:
    """diagnose on an imported run names the tensor that is in trouble; on a clean one, nothing of it."""
    from ottava.diagnose.diagnose import diagnose

    def a_run(name: str, last: float) -> Run:
        lines = [
            line(f"decoder.layers.{layer}.mlp.fc2_activation_underflows%", step, last if layer == 3 else 0.01)
            for step in range(100, 600, 100)
            for layer in range(6)
        ]
        a_log(tmp_path / name, lines)
        return import_run(tmp_path / name, tmp_path / f"{name}-run", recipe="delayed")

    bad, good = diagnose(a_run("bad", 61.0)).to_dict(), diagnose(a_run("good", 0.02)).to_dict()
    (finding,) = bad["findings"]
    assert (finding["id"], finding["layers"]) == ("CAST", ["decoder.layers.3.mlp.fc2"])
    assert (bad["verdict"], finding["stage"], bad["fp8"]) == ("warning", "suspect", "unknown")  # nothing was tried
    assert (good["verdict"], good["findings"]) == ("none", [])


def test_logs_of_the_real_logger(tmp_path: Path) -> None:
    """nvdlfw_inspect's own, with the names under which TransformerEngine logs."""
    logging = pytest.importorskip("nvdlfw_inspect.logging")
    logger = logging.FileLogger("nvdlfw_inspect", str(tmp_path / "logs"))
    logger.initialize("nvdlfw_inspect_logs")
    logger._initialize_stats_logger("nvdlfw_inspect_statistics_logs")
    logger.log_message(f"Assigned layer name: {FC2}")
    values = {"underflows%": 12.5, "mse": 0.25, "cur_amax": 3.0, "std": math.nan, "mxfp8_mse_columnwise": 0.125}
    for statistic, value in values.items():
        logger.log_scalar(f"{FC2}_activation_{statistic}", value, 7)
    run = import_run(tmp_path / "logs", tmp_path / "run")
    rows = run.table().dicts("underflow_pct_numel", "mse", "amax", "std")
    assert {(row["layer"], row["tensor"], row["step"]) for row in rows} == {(FC2, "input", 7)}
    assert {(row["recipe"], row["direction"], row["mse"]) for row in rows} == {
        ("unknown", "row", 0.25),
        ("mxfp8", "col", 0.125),
    }
    real = next(row for row in rows if row["recipe"] == "unknown")
    assert (real["underflow_pct_numel"], real["amax"]) == (12.5, 3.0)
    assert math.isnan(real["std"])
    assert run.manifest["imported"]["not_understood"] == {}
