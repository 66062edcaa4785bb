"""transformers runs what export wrote: its rules are what was multiplied, and "equal" means equal logits."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ottava.serving.executed import Execution, Multiplied, disagreements
from ottava.serving.export import export
from ottava.serving.parity import parity
from ottava.serving.sides import Model, Side, served

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "certificates.py"
RESULTS = json.loads((BENCHMARK.parent / "results" / "certificates.json").read_text())


def test_the_stored_table_has_no_disagreement() -> None:
    """`python benchmarks/certificates.py`: what ran is what the rules say, and the verdict "equal" has equal logits."""
    assert len(RESULTS) == 99
    ran = [row for row in RESULTS if "logits" in row]
    assert len(ran) > 50
    for row in ran:
        assert row["disagreements"] == [], row
        assert row["logits"] == 0 or row["verdict"] != "equal", row
        if row["logits"] == 0 and row["verdict"] != "equal":  # the probe's hard numbers did not come up in 32 tokens
            assert row["causes"] == ["activation-arithmetic"], row
            assert "of hard numbers" in row["found"], row
    assert all(row["why"] for row in RESULTS if row not in ran)


def test_operands_that_differ_are_a_disagreement() -> None:
    x, weight = torch.randn(4, 8).bfloat16(), torch.randn(6, 8).bfloat16()
    theirs = Model({"up": Side(weight), "unseen": Side(weight)}, {}, {}, False)

    def found(rows: torch.Tensor, used: torch.Tensor) -> dict[str, str]:
        ran = Execution("engine", {"up": Multiplied(x, rows.float(), used.float())}, torch.zeros(1))
        return disagreements(theirs, ran)

    assert found(x, weight) == {}
    assert "weight" in found(x, weight * 2)["up"]
    assert "input" in found(x * 2, weight)["up"]
    assert "rules say (6, 8)" in found(x, weight[:5])["up"]


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral", "Gemma2", "Phi3", "GPT2", "Mixtral", "Qwen3Moe",
                                    "DeepseekV3"])  # fmt: skip
def test_rules_are_what_transformers_multiplies(family: str, tmp_path: Path) -> None:
    """Every layout; and the figures are those of the stored table, to the verdict."""
    pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    benchmark: dict[str, Any] = runpy.run_path(str(BENCHMARK))
    for layout in benchmark["LAYOUTS"]:
        row = benchmark["measure"](family, layout, tmp_path / layout)
        known = next(one for one in RESULTS if (one["family"], one["layout"]) == (family, layout))
        assert row.get("disagreements", []) == [], row
        assert (row["verdict"], row.get("causes")) == (known["verdict"], known.get("causes")), row
        if "logits" in row:
            assert row["verdict"] != "equal" or row["logits"] == 0, row


def test_the_example_of_the_docs_by_running(tmp_path: Path) -> None:
    """None is equal: under mxfp8 by blocks of one largest number in 128 only, else nearly everywhere. And so it ran."""
    pytest.importorskip("compressed_tensors")
    import ottava
    from ottava.serving.executed import execute
    from ottava.train.config import ModelConfig
    from ottava.train.llama import as_llama
    from ottava.train.model import ByteTransformer

    torch.manual_seed(0)
    config = ModelConfig(d_model=128, layers=2, heads=2, kv_heads=2, ffn=256)
    ids = torch.randint(0, 256, (24,))
    for recipe, layout, causes in (
        ("mxfp8", "compressed-tensors-mxfp8", {"activation-arithmetic"}),
        ("tensorwise", "compressed-tensors-tensor", {"activation-arithmetic", "decoded"}),
        ("mxfp8", "mxfp8", {"device"}),
    ):
        model = ByteTransformer(config, 64).eval()
        ottava.convert(model, recipe)
        source, folder = as_llama(model, config, 64), tmp_path / f"{recipe}-{layout}"
        export(source, folder, layout=layout)
        certificate = parity(source, folder, "transformers", device="cpu", run=True)
        assert certificate.verdict == "different", certificate
        assert {one.cause for one in certificate.findings} == causes, certificate
        assert "15 of 15 linears" in certificate.ran
        theirs = {name.removeprefix("model."): real for name, real in execute(folder, ids).operands.items()}
        same = []  # a witness: what ran, against the trained layer's own operands for the same input
        for weight in source.weights:
            if weight.cast is not None:
                real = theirs[weight.module.removeprefix("model.")]
                rows = ottava.quantize(real.x, weight.input_spec).dequantize(torch.float32)
                tops = real.x.float().unflatten(1, (-1, 32)).abs().amax(-1).repeat_interleave(32, 1)
                doubled = torch.frexp(tops).mantissa == 1.75 / 2  # the engine takes twice the scale there
                alike = bool(((real.rows == rows) | doubled).all()) and float(doubled.double().mean()) < 0.1
                same.append(alike and torch.equal(real.weight, weight.cast.dequantize(torch.float32)))
        assert len(same) == 14
        assert all(same) if layout.endswith("-mxfp8") else not any(same)


def test_a_false_rule_is_not_certified(pair: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rules of another engine in place of transformers', what ran says so."""
    pytest.importorskip("compressed_tensors")
    from dataclasses import replace

    from ottava.serving import engines

    benchmark: dict[str, Any] = runpy.run_path(str(BENCHMARK))
    model = benchmark["made"]("Llama", "blockwise_fp32")
    one = pair("llama", "blockwise_fp32", "compressed-tensors-block")
    folder = one.folder.parent / "run"
    export(model, folder, layout="compressed-tensors-block")
    false = replace(engines.ENGINES["transformers"], arithmetic=())
    monkeypatch.setattr("ottava.serving.sides.ENGINES", {**engines.ENGINES, "transformers": false})
    certificate = parity(model, folder, "transformers", device="cpu", run=True)
    assert certificate.verdict == "not certified"
    assert {finding.cause for finding in certificate.findings} == {"executed"}
    assert not certificate.equal
    assert served(folder, "transformers").linears
