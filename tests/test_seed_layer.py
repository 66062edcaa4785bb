"""The layer of TransformerEngine issue #1119: which dtypes it has, and the notice of FP32, on small sizes."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

from command import script

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "seed_layer.py"
NOTICE = "Use model.bfloat16() with bfloat16 inputs, or run the forward under torch.autocast"


def test_dtypes_of_every_row_and_the_notice_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 changes no dtype that a caller sees: weights, gradients and AdamW's states stay as they were made."""
    seed = script(SCRIPT)
    monkeypatch.setattr(seed, "sizes", lambda *_: (8, 2, 64, 128, 4, 2))
    single, half = torch.float32, torch.bfloat16
    expected = {"FP32": (single, single), "FP32 under autocast": (single, single), "BF16": (half, half)}
    for ours in (True, False):
        for row, (stream, parameters) in expected.items():
            for recipe in seed.RECIPES:
                trapped = row == "FP32" and recipe != "bf16"
                asks, records = pytest.warns(UserWarning, match=re.escape(NOTICE)), warnings.catch_warnings(record=True)
                with asks if trapped else records as seen:
                    step, facts = seed.measure(row, ours, recipe, torch.device("cpu"), 1.0)
                    step()
                texts = [str(warning.message) for warning in seen or ()]
                assert trapped == any(NOTICE in text for text in texts), (row, recipe)
                assert facts["activations"] == stream
                assert {facts[name] for name in ("weights", "gradients", "optimizer")} == {parameters}
                assert facts["bytes"] > 0


def test_both_ways_to_build_it_have_the_same_sizes() -> None:
    seed = script(SCRIPT)
    ours, plain = (seed.build(kind, "bf16", 64, 128, 4, 2) for kind in (True, False))
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in plain.parameters())
    assert not re.search("TransformerLayer", repr(plain))
