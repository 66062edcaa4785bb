"""The count of TransformerEngine's own tests through our names: its classes, and that it only gets better."""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from command import script

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "te_tests.py"
THEIRS = """
import time
import pytest, torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.cpp_extensions import swizzle_scales
from transformer_engine.pytorch.depths import below, table
from transformer_engine.pytorch import newton_schulz, does_not_exist
from transformer_engine.pytorch.custom_recipes import reference_nvfp4       # theirs
import transformer_engine_torch as tex

available, reason = below(return_reason=True)      # a missing name may be asked while tests are collected

def test_passes():
    with te.autocast():
        assert te.Linear(64, 32, device="cuda")(torch.ones(2, 64, device="cuda")).shape == (2, 32)

def test_compares():
    assert reference_nvfp4.Reference(te.Linear(64, 32)).answer == (tex.DType.kFloat8E4M3, "theirs")

def test_skips():
    pytest.skip("no NVLink")

def test_differs():
    assert te.Linear(64, 32).weight.shape == (64, 32)

@pytest.mark.parametrize("name", [table["x"]])
def test_goes_below(name):
    with pytest.raises(ValueError):                # whatever it expects, the missing name is the reason
        below()

def test_is_refused():
    newton_schulz(torch.ones(2, 2))

def test_is_a_kernel():
    swizzle_scales(torch.ones(2))

def test_needs_a_graph():
    torch.cuda.CUDAGraph()

def test_is_too_large():
    try:
        torch.empty(1 << 50)
    except RuntimeError as error:                  # as torch.testing does
        raise RuntimeError("Comparing") from error

def test_hangs():
    time.sleep(600)
"""

REFERENCE = """
from transformer_engine.pytorch.quantized_tensor import Quantizer

class Reference(Quantizer):
    def __init__(self, layer):
        super().__init__(rowwise=layer is not None)
        self.answer = self.dtype, "theirs"
"""


@pytest.fixture
def te_tests() -> ModuleType:
    return script(SCRIPT)


def tables() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((SCRIPT.parent / "results" / "te_tests.json").read_text())
    return found


def test_the_table_only_gets_better() -> None:
    by_sample: dict[str, list[dict[str, Any]]] = {}
    for table in tables():
        assert (
            sum(table[name] for name in ("passed", "skipped", "ours", "internal", "refused", "cuda", "limit"))
            == (table["ran"])
        )
        judged = sum(table[name] for name in ("passed", "ours", "internal", "refused"))
        assert table["share"] == round(table["passed"] / judged, 4)
        by_sample.setdefault(f"{table['theirs']} {table['sample']}", []).append(table)
    for same in by_sample.values():
        for earlier, later in itertools.pairwise(same):
            assert later["passed"] >= earlier["passed"], later["title"]
            assert later["share"] >= earlier["share"], later["title"]


def test_each_class_is_recognised(te_tests: ModuleType, tmp_path: Path) -> None:
    """A folder of TransformerEngine's form, with a test of each class."""
    folder = tmp_path / "tests" / "pytorch"
    folder.mkdir(parents=True)
    (folder / "test_of_theirs.py").write_text(THEIRS)
    references = tmp_path / "transformer_engine" / "pytorch" / "custom_recipes"
    references.mkdir(parents=True)
    (references / "reference_nvfp4.py").write_text(REFERENCE)
    options = argparse.Namespace(file="", only="", sample=0, seed=0, seconds=5.0, gigabytes=6.0)
    found = te_tests.run_all(tmp_path, options)
    records = found["test_of_theirs.py"]["records"]
    results = {test.partition("::")[2].partition("[")[0]: result for test, result, _ in records}
    assert results == {
        "test_passes": "passed",
        "test_compares": "passed",
        "test_skips": "skipped",
        "test_differs": "ours",
        "test_goes_below": "internal",
        "test_is_refused": "refused",
        "test_is_a_kernel": "cuda",
        "test_needs_a_graph": "cuda",
        "test_is_too_large": "limit",
        "test_hangs": "limit",
    }
    names = [detail for _, result, detail in records if result == "internal"]
    assert names == ["depths.below"]
    table = te_tests.table(found)
    assert (table["collected"], table["ran"], table["share"]) == (10, 10, 0.4)
    options.sample = 3
    chosen = te_tests.run_all(tmp_path, options)["test_of_theirs.py"]["records"]
    assert [record[0] for record in chosen] == [
        record[0] for record in te_tests.run_all(tmp_path, options)["test_of_theirs.py"]["records"]
    ]
    assert Counter(record[1] for record in chosen).total() == 3


def test_a_worse_table_is_not_written(te_tests: ModuleType, tmp_path: Path) -> None:
    entry = {"sample": [1, 0], "theirs": "2.20", "passed": 5, "share": 0.5}
    te_tests.write(entry, tmp_path / "table.json")
    with pytest.raises(SystemExit, match="4 pass; the last table has 5"):
        te_tests.write({**entry, "passed": 4}, tmp_path / "table.json")
    te_tests.write({**entry, "passed": 6}, tmp_path / "table.json")
    assert len(json.loads((tmp_path / "table.json").read_text())) == 2
