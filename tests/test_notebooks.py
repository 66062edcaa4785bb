"""What a notebook shows of a result, and the notebooks of docs: they run, and hold the outputs of their code."""

from __future__ import annotations

import ast
import builtins
import hashlib
import html
import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ottava
import warm
from lab_samples import study
from ottava.diagnose.diagnose import diagnose
from ottava.measure.tally import Tally
from ottava.record.reader import Run
from ottava.record.schema import SlotKey
from ottava.record.writer import RunWriter


def trained() -> tuple[nn.Module, Any]:
    """A model after a step, and what was observed."""
    model = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    ottava.convert(model, "tensorwise")
    with ottava.debug.observe(model) as seen:
        model(torch.ones(4, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    return model, seen


def recipe(folder: Path) -> Any:
    return ottava.RECIPES["nvfp4"].override("*.head", "bf16")


def watched(folder: Path) -> Any:
    key = SlotKey("fc1", "input", "row", "tensorwise", "E4M3", "tensor", "fp32", "current", "door")
    with RunWriter(folder / "run") as writer:
        writer.step(1, loss=2.0)
        writer.tally(1, key, Tally(n=8, n_nonzero=8, n_underflow=2))
    return Run.open(folder / "run")


WHATS: tuple[tuple[Callable[[Path], Any], int, str], ...] = (
    (lambda _: ottava.receipt(trained()[0]), 3, "<Receipt: 3 GEMMs, 100.0% of the linear work in FP8, "),
    (lambda _: trained()[1], 3, "<Observation: 3 casts of 1 layers"),
    (recipe, 6, "<Recipe nvfp4: fprop E2M1[1x16, e4m3] x E2M1[16x16, e4m3], dgrad "),
    (watched, 1, "<Run "),
    (lambda folder: diagnose(watched(folder)), 1, "<Diagnosis "),
    (lambda _: study({"mxfp8": [0.1] * 4, "nvfp4": [0.2] * 4}), 0, "<LabResult: "),
)


@pytest.mark.parametrize(("make", "rows", "line"), WHATS, ids=[line.strip("<: ").split()[0] for *_, line in WHATS])
def test_each_result_has_a_line_a_table_and_a_frame(
    make: Callable[[Path], Any], rows: int, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = make(tmp_path)
    assert repr(shown).startswith(line)
    assert "\n" not in repr(shown)
    assert len(repr(shown)) < 250
    page = shown._repr_html_()
    assert page.startswith("<table>")
    assert page.count("<tr>") > 1
    assert html.unescape(page) != ""
    pandas = pytest.importorskip("pandas")
    frame = shown.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert len(frame) == (rows or len(shown.others))

    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "pandas":
            raise ImportError("no pandas")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="pip install pandas"):
        shown.to_pandas()


# --- the notebooks of the docs ----------------------------------------------------------------------------------------

BOOKS = sorted((Path(__file__).resolve().parents[1] / "docs" / "notebooks").glob("*.ipynb"))


def code_of(book: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in book["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_keeps_what_it_asserts(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells in order, in one namespace; what a cell ends with draws itself. Two minutes of two cores are 240 s."""
    pytest.importorskip("matplotlib", reason="an extra: pip install 'ottava[plot]'")
    monkeypatch.chdir(tmp_path)
    cold = subprocess.run
    start: Any = lambda words, **o: warm.run(words[1:], cwd=o["cwd"]) if "ottava" in words else cold(words, **o)  # noqa: E731
    monkeypatch.setattr(subprocess, "run", start)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    started, drawn, asserted = time.process_time(), 0, 0
    for number, cell in enumerate(code_of(json.loads(path.read_text(encoding="utf-8")))):
        tree = ast.parse("".join(cell["source"]))
        asserted += sum(isinstance(node, ast.Assert) for node in ast.walk(tree))
        last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"{path.name}[{number}]", "exec"), namespace)
        shown = eval(compile(last, f"{path.name}[{number}]", "eval"), namespace) if last else None
        drawn += hasattr(shown, "_repr_png_") and shown._repr_png_().startswith(b"\x89PNG")
    assert asserted >= 3
    assert drawn >= (path.stem != "parity")
    assert time.process_time() - started < 240


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_the_outputs_of_its_code(path: Path) -> None:
    """`./x docs --notebooks` executed it from top to bottom after the last change; no error, no warning, no path."""
    book = json.loads(path.read_text(encoding="utf-8"))
    cells = code_of(book)
    sources = "\0".join("".join(cell["source"]) for cell in cells)
    assert book["metadata"]["executed"] == hashlib.sha256(sources.encode()).hexdigest(), "./x docs --notebooks"
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result", "display_data"}
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    assert not re.search(r'"(?:/tmp|/home|/root|/work)/', path.read_text(encoding="utf-8"))
    assert path.stat().st_size < 300_000
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= (path.stem != "parity")
