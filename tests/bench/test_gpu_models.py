"""Layers and models under the benchmark: they are what their names say, and what ran stands in the rows."""

from __future__ import annotations

import math

import torch

from ottava.bench import gpu_models
from ottava.bench.method import Run
from ottava.train.model import VOCABULARY

SMOKE = Run(torch.device("cpu"), smoke=True, rounds=2, rivals=False, compiled=False)


def test_rows_of_layers_name_kernels_errors_and_predictions() -> None:
    """BF16 is the unit; FP8 is near it, not equal."""
    rows = gpu_models.linear(SMOKE)["rows"]
    assert rows[0]["recipe"] == "bf16"
    assert all(0 < row["relative_error"] < 0.15 for row in rows[1:])
    assert all(set(row["ran"]) == {"fprop", "dgrad", "wgrad"} and row["predicted"] > 0 for row in rows[1:])
    assert rows[0]["relative_error"] == 0
    assert rows[0]["speedup"] == 1


def test_predicted_scales_are_predicted_when_they_are_timed() -> None:
    """Otherwise delayed scaling would be timed as it is in its first step only."""
    found = gpu_models.contenders(SMOKE, lambda: gpu_models.linear_layer(SMOKE, 32, 32), ("delayed",))
    x, dy = torch.randn(8, 32).bfloat16().requires_grad_(), torch.randn(8, 32).bfloat16()
    gpu_models.settled({one.name: gpu_models.step(one.forward, one.model, x, dy) for one in found}, found)
    assert all(door.scale > 0 for door in found[1].model.quantizers.doors)  # type: ignore[union-attr]


def test_the_block_is_causal_and_the_seed_layer_is_not() -> None:
    """A later token changes earlier outputs only without a mask."""
    torch.manual_seed(0)
    x = torch.randn(2, 6, 32)
    later = x.clone()
    later[:, 4] += 1
    for layer, causal in ((gpu_models.Block(32, 64, 4, 2), True), (gpu_models.SeedLayer(32, 64, 4, 2), False)):
        y, changed = layer(x), layer(later)
        assert y.shape == x.shape
        assert torch.equal(y[:, :4], changed[:, :4]) is causal
        assert not torch.equal(y[:, 4:], changed[:, 4:])


def test_training_learns_and_counts_tokens() -> None:
    """Losses begin at about ln 256 for all, and are those of the steps that were timed."""
    rows = gpu_models.train(SMOKE)["rows"]
    assert [row["recipe"] for row in rows] == ["bf16", "tensorwise", "delayed", "guarded"]
    for row in rows:
        assert abs(row["first_loss"] - math.log(VOCABULARY)) < 0.5
        assert row["last_loss"] < row["first_loss"]
        assert row["steps"] == 3  # one to warm up and two that count
        assert row["tokens_per_second"] == 32 / row["median"]


def test_the_text_can_be_learned() -> None:
    """Most bytes follow from the one before."""
    text = gpu_models.learnable(SMOKE, 64, 100)
    follows = (text[:, 1:] == (text[:, :-1] + 7) % VOCABULARY).double().mean()
    assert text.shape == (64, 101)
    assert 0.7 < follows < 0.83  # (7/8)**2 and chance
