"""`ottava lab`: a page, a table and JSON with the same numbers; killed, it loses one seed at most."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from ottava.cli.app import app
from warm import Warm

CELL = "{format: E2M1, granularity: 1x32, scale_format: e8m0}"
SMALL = ("--quick", "--steps", "2", "--seeds", "2")


def run(*arguments: object) -> int:
    return app(list(map(str, arguments)), standalone_mode=False)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_killed_study_of_a_yaml_recipe_goes_on_and_writes_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """kill -9 in the middle; the same command measures what is missing, and the JSON holds what the page says."""
    monkeypatch.chdir(tmp_path)
    Path("mxfp4.yaml").write_text(
        "".join(f"{gemm}: {{lhs: {CELL}, rhs: {CELL}}}\n" for gemm in ("fprop", "dgrad", "wgrad"))
    )
    process = Warm(["-m", "ottava", "lab", "mxfp4.yaml", *SMALL], cwd=tmp_path)
    results, limit = tmp_path / "runs" / "lab" / "results", time.monotonic() + 600
    while not (results.is_dir() and any(results.glob("*.json"))) and time.monotonic() < limit:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {path: path.stat().st_mtime_ns for path in results.glob("*.json")}
    assert kept, "the first seed is kept"
    capsys.readouterr()
    assert run("lab", "mxfp4.yaml", *SMALL, "--json", "--out", "deep/page.html") == 0
    printed = capsys.readouterr()
    assert f"{len(kept)} of 4 are measured already" in printed.err
    assert all(path.stat().st_mtime_ns == before for path, before in kept.items())
    values = json.loads(printed.out)
    assert [recipe["name"] for recipe in values["recipes"]] == ["bf16", "mxfp4"]
    assert len(values["measurements"]) == 4
    assert values["bits"]["mxfp4"]["wgrad.lhs"] == 4.25
    page = Path("deep/page.html").read_text()
    assert values["findings"][0]["sentence"].replace("'", "&#39;") in page
    assert "ottava lab mxfp4.yaml --seeds 2 --steps 2 --quick --out deep/page.html" in page
    assert run("lab", "mxfp4.yaml", *SMALL) == 0  # from the kept results alone
    said = capsys.readouterr().out
    assert values["findings"][0]["sentence"] in " ".join(said.split())
    assert "page: runs/lab/lab.html" in said


def test_wrong_words_are_refused_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words, match in (
        (("mxpf8",), "mxfp8"),
        (("none.yaml",), "cannot be read"),
        (("mxfp8", "--seeds", 0), "1 or more"),
        (("mxfp8", "--out", tmp_path), "is a folder"),
    ):
        with pytest.raises((ValueError, OSError), match=match):
            run("lab", *words)
    assert list(tmp_path.iterdir()) == []
