"""`ottava formats`: what it prints is what the formats say, code by code, and against ml_dtypes."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import numpy as np
import pytest

import command
from ottava.numerics.formats import FORMATS, Format
from ottava.numerics.rounding import code_values
from ottava.recipe import GEMMS, RECIPES, Recipe

LISTED = [fmt for fmt in FORMATS.values() if fmt.bits <= 8]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    return command.ended("formats", *arguments), *capsys.readouterr()


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    code, out, err = run(capsys, *arguments, "--json")
    document = json.loads(out)
    assert (code, err, document["schema_version"], set(document)) == (0, "", 1, {"schema_version", "formats"})
    return document["formats"]  # type: ignore[no-any-return]


def test_every_format_has_a_line(fmt: Format, capsys: pytest.CaptureFixture[str]) -> None:
    """Its name, width and fields; no line is folded."""
    code, out, _ = run(capsys)
    (line,) = [line for line in out.splitlines() if line.startswith(f"{fmt.name} ")]
    assert code == 0
    assert line.split()[1:3] == [str(fmt.bits), f"{int(fmt.signed)}|{fmt.exponent_bits}|{fmt.mantissa_bits}"]
    assert len([line for line in out.splitlines() if re.match(r"E|BF|FP", line)]) == len(FORMATS)


@pytest.mark.parametrize("fmt", LISTED, ids=str)
def test_json_lists_every_code(fmt: Format, ml_dtypes_type: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Values equal those of ml_dtypes, the fields joined give the code, and infinities and NaNs are null in JSON."""
    codes = run_json(capsys, fmt.name.lower())[0]["codes"]
    values = np.arange(1 << fmt.bits, dtype=np.uint8).view(ml_dtypes_type).astype(np.float64)
    assert [entry["code"] for entry in codes] == list(range(1 << fmt.bits))
    for entry, value in zip(codes, values.tolist(), strict=True):
        assert int(entry["hex"], 16) == entry["code"]
        sign, exponent, mantissa = entry["sign"], entry["exponent"], entry["mantissa"]
        assert (((sign << fmt.exponent_bits) | exponent) << fmt.mantissa_bits) | mantissa == entry["code"]
        if entry["kind"] in ("NaN", "infinity"):
            assert entry["value"] is None
            assert not np.isfinite(value)
            assert np.isnan(value) == (entry["kind"] == "NaN")
        else:
            assert entry["value"] == value
            kind = "zero" if value == 0 else "normal" if abs(value) >= fmt.min_normal else "subnormal"
            assert entry["kind"] == kind


@pytest.mark.parametrize("fmt, width", zip(LISTED, itertools.cycle((60, 80, 200))), ids=str)
def test_the_grid_shows_every_code_once(
    fmt: Format, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code of the row plus bits of the column is the code of the cell, in narrow and wide terminals."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = run(capsys, fmt.name)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in out.splitlines()]
    (header,) = [i for i, line in enumerate(lines) if line.startswith("code")]
    columns = [int(word, 2) for word in lines[header].split() if re.fullmatch("[01]+", word)]
    end = next(i for i, line in enumerate(lines) if i > header and not line.strip())
    rows = [line.split() for line in lines[header + 2 : end]]
    values = code_values(fmt).tolist()
    shown = {}
    for row in rows:
        for column, text in zip(columns, row[-len(columns) :], strict=True):
            shown[int(row[0], 16) + column] = text
    assert list(shown) == list(range(1 << (fmt.bits - int(fmt.signed))))
    for code, text in shown.items():
        exact = 2.0 ** int(text[2:]) if text.startswith("2^") else float(text)
        assert exact == pytest.approx(values[code], rel=1e-4, nan_ok=True)


def test_the_numbers_of_e4m3_are_worked_out(capsys: pytest.CaptureFixture[str]) -> None:
    """The facts that a newcomer looks for, in words that a person reads."""
    _, out, _ = run(capsys, "E4M3")
    for line in (
        "layout       1 sign bit, 4 exponent bits, 3 mantissa bits, bias 7",
        "largest      448 = 1.75 * 2^8",
        "smallest     0.001953125 = 2^-9",
        "eps          0.125 = 2^-3: rounding a normal number errs by at most 6.25 %",
        "scales of    nvfp4, nvfp4_rht, four_over_six, four_over_six_te, ms_eden, averis",
    ):
        assert f"  {line}\n" in out
    assert re.search(r"^78 +s\|1111\|\.\.\. +normal/NaN +256 .* 448 +NaN *$", out, re.MULTILINE)


def test_wide_formats_list_their_codes_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    """65,536 codes of BF16 only with --all; FP32 has only numbers, and says why."""
    _, out, _ = run(capsys, "BF16")
    assert "65,536 codes: --all lists them." in out
    assert "codes" not in run_json(capsys, "BF16")[0]
    codes = run_json(capsys, "BF16", "--all")[0]["codes"]
    assert len(codes) == 1 << 16
    assert codes[0x3F80] == {
        "hex": "3f80",
        "code": 0x3F80,
        "sign": 0,
        "exponent": 127,
        "mantissa": 0,
        "value": 1.0,
        "kind": "normal",
    }
    _, out, _ = run(capsys, "FP32")
    assert "codes" not in out
    code, out, err = run(capsys, "FP32", "--all")
    assert (code, out) == (2, "")
    assert "FP32 has 2**32 codes; at most 2**16 are listed" in err


def test_slips_end_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    """The nearest name, and what --all is for; nothing on stdout, with --json either."""
    for arguments, message in (
        (["e4m4"], "unknown format 'e4m4'; did you mean 'E4M3'"),
        (["e4m4", "--json"], "unknown format 'e4m4'; did you mean 'E4M3'"),
        (["nvpf4"], "unknown format 'nvpf4'; did you mean 'nvfp4'"),
        (["--all"], "lists the codes of one format; give its name"),
    ):
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (2, "")
        assert message in err


# --- recipes ---------------------------------------------------------------------------------------------------------


def test_every_recipe_has_its_cells(capsys: pytest.CaptureFixture[str]) -> None:
    """In a line of text and as JSON; bf16 casts nothing."""
    assert command.run("recipes") == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert command.run("recipes", "--json") == 0
    listed = {one["name"]: one for one in json.loads(capsys.readouterr().out)["recipes"]}
    assert list(listed) == list(RECIPES)
    for name, recipe in RECIPES.items():
        assert all(str(getattr(recipe, gemm)) in lines[name] for gemm in GEMMS)
        assert Recipe.from_dict({key: listed[name][key] for key in listed[name] if key != "operands"}) == recipe
        assert [one["operand"] for one in listed[name]["operands"]] == ["x", "w", "dy", "w.T", "dy.T", "x.T"]
    assert {one["bytes_per_element"] for one in listed["bf16"]["operands"]} == {2.0}


def test_a_recipe_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes with the scales' share, and for each step one kernel that runs; `formats` knows the name, too."""
    assert command.run("recipes", "nvfp4", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["recipes"]
    assert [one["bytes_per_element"] for one in found["operands"]][:2] == [0.5 + 1 / 16, 0.5 + 1 / 256]
    for step in ("cast lhs", "cast rhs", "gemm"):
        runs = [
            row["gemms"]
            for row in found["kernels"]
            if (row["device"], row["step"], row["why"]) == ("cpu", step, "runs")
        ]
        assert sorted(",".join(runs).split(",")) == sorted(GEMMS)
    assert any(row["kernel"] == "scaled_mm" and "takes E4M3 and E5M2" in row["why"] for row in found["kernels"])
    assert command.run("recipes", "nvfp4") == 0
    text = capsys.readouterr().out
    assert command.run("formats", "nvfp4") == 0
    assert capsys.readouterr().out == text
    assert "BF16 has 2 bytes per element." in text
    assert command.run("formats", "bf16") == 0  # a format of this name comes before the recipe
    assert "7 mantissa bits" in capsys.readouterr().out
    assert command.run("recipes", "bf16") == 0
    assert "No GEMM is quantized" in capsys.readouterr().out
    with pytest.raises(ValueError, match="did you mean 'nvfp4'"):
        command.run("recipes", "nvpf4")
