"""The page is one small file; in a browser it draws, speaks two languages, and its controls do what they say."""

from __future__ import annotations

import html as markup
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import command
from ottava.explorer import explorer_page, tables
from ottava.numerics.formats import E4M3, FORMATS
from ottava.numerics.tensor import QuantizationSpec
from ottava.recipe import RECIPES
from ottava.record.amaxes import AmaxLog
from ottava.train.run_folder import StepRecord
from page_checker import Checker

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (1280, 768, 390)


def test_the_command_writes_one_small_file_without_references(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "explorer.html"
    assert command.run("explorer", "--out", page, "--json") == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == page.stat().st_size < 300_000
    text = page.read_text(encoding="utf-8")
    assert "八位数能留下什么" in Checker(text).text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert command.ended("explorer", "--out", tmp_path / "missing" / "a.html") == 2
    assert "make it first" in capsys.readouterr().err


def test_every_format_and_recipe_is_in_the_tables_and_none_in_the_scripts() -> None:
    """A new one needs no JavaScript; its largest number stands in no script."""
    found = tables()
    assert (found["formats"].keys(), found["recipes"].keys()) == (FORMATS.keys(), RECIPES.keys())
    scripts = explorer_page().split('id="tables">')[1].partition("</script>")[2]
    told = {
        name for name in ("448", "57344", "240", "0.0625", *RECIPES) if re.search(rf"\b{re.escape(name)}\b", scripts)
    }
    assert told == {"mxfp8", "mxfp4", "guarded", "four_over_six", "ms_eden"}  # the first two to train, and three rules


ACT = Path(__file__).with_name("act.js").read_text(encoding="utf-8")


def run_files(folder: Path) -> dict[str, str]:
    """Files of a run by their own writers, the first with a torn line; and one that is none."""
    records = [StepRecord(i, math.nan if i == 3 else 2 / i, 1.0, 0.1, 64, 0.5, None) for i in range(1, 9)]
    lines = "\n".join([record.to_json() for record in records] + ['{"step": 9, "lo'])
    log = AmaxLog(folder)
    for step in (1, 2):
        log.append(step, [("fc", "input", QuantizationSpec(E4M3, scaling="delayed"), 2.0 * step)])
    hostile = '{"step": 1, "__proto__": 2, "<b>": 3}\nnull\n'
    amaxes = (folder / "amax.jsonl").read_text("utf-8")
    return {"metrics.jsonl": lines, "amax.jsonl": amaxes, "hostile": hostile, "notes.txt": "a\nb\n"}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What a person would read after these acts."""
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    folder = tmp_path_factory.mktemp("explorer")
    act = f"const FILES = {json.dumps(run_files(folder))}; {ACT}"
    page = folder / "page.html"
    page.write_text(explorer_page().replace("</body>", f"<script>{act}</script></body>"), encoding="utf-8")
    frames = "".join(f'<iframe width="{width}" height="800" src="page.html"></iframe>' for width in WIDTHS)
    script = Path(__file__).with_name("frames.js").read_text(encoding="utf-8")
    frame = folder / "frame.html"
    frame.write_text(f"<!doctype html><title></title><body>{frames}<script>{script}</script>", encoding="utf-8")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += [f"--user-data-dir={folder / 'profile'}", "--allow-file-access-from-files", "--lang=en"]
    flags += ["--virtual-time-budget=200000", "--enable-logging=stderr", "--dump-dom", frame.as_uri()]
    done = subprocess.run([CHROMIUM, *flags], capture_output=True, text=True, timeout=600)
    assert "CONSOLE" not in done.stderr, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    found = re.search("<title>(.+?)</title>", done.stdout)
    assert found is not None
    answer: dict[str, list[str]] = json.loads(markup.unescape(found[1]))
    return answer


def test_a_number_has_its_code_its_error_and_its_zone(answers: dict[str, list[str]]) -> None:
    """E4M3 ends at 448, code 0x7E; its smallest number is 2**-9, 1.953 times 0.001."""
    assert answers["clipped"] == ["E4M3", "448", "10.4 %", "clipped", "0x7E", "01111110", "416", "–"]
    assert answers["subnormal"][1:5] == ["0.001953125", "95.3 %", "subnormal", "0x01"]
    assert answers["subnormal"][5:] == ["00000001", "0", "0.00390625"]


def test_blocks_survive_an_outlier_and_one_scale_does_not(answers: dict[str, list[str]]) -> None:
    """x times 2**20 at one place: SQNR of the others. Blocks of 32 lose 31 of 2,047 numbers: about 18 dB are left."""
    assert float(answers["tensorwise"][4]) < 3
    assert float(answers["mxfp8"][4]) == pytest.approx(10 * math.log10(2047 / 31), abs=2)
    assert "31 of 2,048 numbers became 0, in 1 of 64 blocks" in answers["moved"]


def test_a_pointer_moves_the_number_and_the_outlier(answers: dict[str, list[str]]) -> None:
    """To the end of the line, 2**20, and to the first element."""
    assert answers["dragged"] == ["1048576"]
    assert answers["corner"] == ["0", "0"]


def test_a_file_of_a_run_is_read_and_its_torn_line_ignored(answers: dict[str, list[str]]) -> None:
    assert answers["metrics.jsonl"][0] == "metrics.jsonl: lines 9, columns 6."
    assert answers["metrics.jsonl"][1:] == ["loss", "grad_norm", "lr", "tokens", "seconds", "val_loss"]
    assert answers["amax.jsonl"] == ["amax.jsonl: lines 3, columns 1.", "fc.input"]
    left_out = "hostile: lines 2, columns 2; left out, because they are no JSON objects: 1."
    assert answers["hostile"] == [left_out, "__proto__", "<b>"]
    assert answers["notes.txt"][0].startswith("notes.txt: no line with a step and a number was found in 2 lines.")


def test_a_folder_of_a_run_is_read_whole(answers: dict[str, list[str]]) -> None:
    """Files of a run at its top, of all batches that the browser lists; not others, nor folders."""
    assert answers["folder"] == ["run/ metrics.jsonl, amax.jsonl: lines 12, columns 7.", "loss", "fc.input"]


def test_the_page_speaks_chinese_and_is_never_wider_than_a_phone(answers: dict[str, list[str]]) -> None:
    assert answers["chinese"] == ["八位数能留下什么？", "格式", "zh-CN"]
    assert answers["over"] == [0, 0, 0]


def test_the_training_runs_by_itself(answers: dict[str, list[str]]) -> None:
    assert re.match(r"A mxfp8: loss [\d.]+ at step \d+\. B mxfp4: ", str(answers["told"]))
