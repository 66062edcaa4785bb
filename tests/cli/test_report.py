"""`ottava report` writes the file it names, and its exit code is the verdict's."""

import json
from pathlib import Path

import pytest
import torch

import ottava
from ottava.cli.app import app
from ottava.measure.walk import measure
from ottava.record.reader import Run
from ottava.record.schema import RunError, SlotKey
from ottava.record.writer import RunWriter


def run(*arguments: object) -> int:
    return app(["report", *map(str, arguments)], standalone_mode=False)  # type: ignore[no-any-return]


def watched(path: Path, outliers: float) -> Path:
    """Eight looks at FC2's input, of which four tokens are so much larger."""
    key = SlotKey("layers.1.mlp.down_proj", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
    torch.manual_seed(0)
    with RunWriter(path) as writer:
        for step in range(1, 9):
            x = torch.randn(128, 256)
            x[:4] *= outliers
            writer.step(step, loss=2.0 - 0.1 * step)
            writer.tally(step, key, measure(x, ottava.quantize(x, ottava.QuantizationSpec(ottava.E4M3))))
    return path


def test_clean_run_exits_0_and_writes_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = watched(tmp_path / "run", 1.0)
    assert run(folder, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    written = Path(values["report"])
    assert (written, values["bytes"]) == (folder / "report.html", written.stat().st_size)
    assert values["verdict"] == "none"
    assert "layers.1.mlp.down_proj" in written.read_text(encoding="utf-8")
    assert [path.name for path in folder.glob("report*")] == ["report.html"]  # nothing half-written


def test_damaged_run_exits_1_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, out = watched(tmp_path / "good", 1.0), watched(tmp_path / "bad", 1e5), tmp_path / "page.html"
    assert run(bad, "--baseline", good, "--out", out) == 1
    sentence = capsys.readouterr().out.splitlines()[0]
    html = out.read_text(encoding="utf-8")
    assert "critical" in html
    assert 'id="difference"' in html
    assert sentence
    assert not (bad / "report.html").exists()
    assert Run.open(bad).manifest == json.loads((bad / "watch.json").read_text())  # a report changes nothing


def test_folder_without_a_run_is_a_bad_input(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"watch\.json") as caught:
        run(tmp_path)
    assert caught.value.exit_code == 4
