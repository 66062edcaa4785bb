"""The examples run, and show what they say they show."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_resuming_from_bf16_is_smooth_with_calibration(capsys: pytest.CaptureFixture[str]) -> None:
    """Calibrated, the first FP8 loss is BF16's; from scale 1 most of some layer's first gradient is cast to zero."""
    main = runpy.run_path(str(ROOT / "examples" / "resume_from_bf16.py"))["main"]
    losses, flushed = main(30, 2)
    assert abs(losses["calibrated"][0] - losses["bf16"][0]) < 0.01
    assert flushed["calibrated"] < 5 < 20 < flushed["scale 1 first"]
    assert "calibrated" in capsys.readouterr().out


def test_the_example_config_is_valid() -> None:
    """examples/train.yaml has no unknown key and names a recipe that exists."""
    from ottava.train.config import load_config

    assert load_config(ROOT / "examples" / "train.yaml", []).steps > 0
