"""Views of checkpoints, and with transformers those of its models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ottava.numerics.formats import E4M3
from ottava.numerics.scaling import BLOCK_1X128, BLOCK_128X128, PER_ROW
from ottava.numerics.tensor import QuantizationSpec
from ottava.ops.quantize import quantize
from ottava.serving.evaluate import evaluate
from ottava.serving.source import Source, Weight
from ottava.serving.view import bytes_only, decode_bytes, encode_bytes, engine_recipe, of_hugging_face
from ottava.train.views import open_view
from serving_samples import TEXT, exported


def test_bytes_are_tokens() -> None:
    assert decode_bytes(encode_bytes("größe\n")) == "größe\n"
    assert decode_bytes([255]) == "\N{REPLACEMENT CHARACTER}"


def test_the_engine_of_codes() -> None:
    def source(*specs: QuantizationSpec, static: float | None = None) -> Source:
        x = torch.randn(128, 128)
        return Source(tuple(Weight("a.weight", x, True, "", quantize(x, spec), static) for spec in specs), {})

    blocks = engine_recipe(source(QuantizationSpec(E4M3, BLOCK_128X128, "pow2")))
    assert blocks.fprop.lhs == QuantizationSpec(E4M3, BLOCK_1X128, "pow2")
    for bad, words in (
        (source(), "no FP8 weights"),
        (source(QuantizationSpec(E4M3), QuantizationSpec(E4M3, PER_ROW)), "no one recipe"),
        (source(QuantizationSpec(E4M3), static=0.1), "static scales"),
    ):
        with pytest.raises(ValueError, match=words):
            engine_recipe(bad)


def test_transformers_views_are_ours(tmp_path: Path) -> None:
    """The same folder through transformers and through the trainer's model: one loss, in BF16 and in FP8."""
    pytest.importorskip("transformers")
    for layout in ("bf16", "fp8-block", "compressed-tensors-channel"):
        folder = exported(layout)
        assert bytes_only(folder)
        for recipe in (None, "engine")[: 1 if layout == "bf16" else 2]:
            theirs, ours = of_hugging_face(folder, recipe), open_view(str(folder), recipe)
            result = evaluate(ours, theirs, {"sums": TEXT}, chunks=8, generate=2)
            assert result.verdict.kind == "same", (layout, recipe, result.verdict)
            assert abs(result.answers.change.mean) < 0.005
    rowwise = of_hugging_face(exported("bf16"), "rowwise")
    assert rowwise.casts_weights
    assert rowwise.casts_activations
    with pytest.raises(ValueError, match="no FP8 weights"):
        of_hugging_face(exported("bf16"), "engine")
