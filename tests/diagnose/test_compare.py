"""Two runs: what left the good run's band first, ranked in bits, and the settings that differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ottava
from ottava.diagnose.compare import METRICS, compare
from ottava.measure.walk import measure
from ottava.record.reader import Run
from ottava.record.schema import RunError, SlotKey
from ottava.record.writer import RunWriter

Change = Callable[[str, str, int, Tensor], Tensor]
LAYERS = ("layers.0.fc1", "layers.0.fc2", "layers.1.fc1", "layers.1.fc2")
STEPS = (1, 2, 4, 6, 8, 10, 12)


def unchanged(layer: str, tensor: str, step: int, x: Tensor) -> Tensor:
    return x


def record(
    folder: Path,
    change: Change = unchanged,
    *,
    seed: int = 0,
    layers: tuple[str, ...] = LAYERS,
    loss: Callable[[int], float] = lambda step: 3 - 0.01 * step,
    tokens: int = 100,
    every: int = 1,
    **config: object,
) -> Run:
    """Real casts of real tensors, in the order of a forward and a backward."""
    generator = torch.Generator().manual_seed(seed)
    specs = {"input": ottava.E4M3, "weight": ottava.E4M3, "grad_output": ottava.E5M2}
    with RunWriter(folder) as writer:
        writer.describe(config=config, layers=[{"name": n, "recipe": "tensorwise"} for n in layers])
        for step in range(1, STEPS[-1] + 1):
            writer.step(step * every, loss=loss(step), tokens=tokens)
            if step not in STEPS:
                continue
            order = [(layer, t) for layer in layers for t in ("input", "weight")]
            order += [(layer, "grad_output") for layer in reversed(layers)]
            for layer, tensor in order:
                x = change(layer, tensor, step, torch.randn(64, 128, generator=generator))
                spec = ottava.QuantizationSpec(specs[tensor])
                key = SlotKey(layer, tensor, "row", "tensorwise", spec.format.name, "tensor", "fp32", "current", "door")
                writer.tally(step * every, key, measure(x, ottava.quantize(x, spec)))
    return Run.open(folder)


def outliers_from(start: int, *where: tuple[str, str], factor: float = 1e5) -> Change:
    def change(layer: str, tensor: str, step: int, x: Tensor) -> Tensor:
        delay = 2 * [w[0] for w in where].index(layer) if (layer, tensor) in where else 0
        if (layer, tensor) in where and step >= start + delay:
            x[0] *= factor
        return x

    return change


def test_equal_runs_and_runs_of_other_seeds_do_not_differ(tmp_path: Path) -> None:
    good = record(tmp_path / "good")
    for seed in range(3):
        result = compare(good, record(tmp_path / f"seed{seed}", seed=seed))
        assert result.first is None
        assert not result.diverged
        assert result.steps_compared == len(STEPS)
    assert "no cast leaves" in result.verdict


def test_the_first_to_leave_is_named_with_its_lead(tmp_path: Path) -> None:
    good = record(tmp_path / "good", lr=1e-3)
    change = outliers_from(4, ("layers.0.fc2", "input"), ("layers.1.fc1", "input"))
    bad = record(tmp_path / "bad", change, seed=1, lr=1e-2, loss=lambda s: 3 - 0.01 * s + max(s - 9, 0) / 2)
    result = compare(good, bad)
    assert result.config[0] == {"key": "lr", "good": 1e-3, "bad": 1e-2}
    assert result.first is not None
    assert (result.first["layer"], result.first["tensor"], result.first["step"]) == ("layers.0.fc2", "input", 4)
    assert result.first["direction"] == "forward"
    assert result.first["then"] == ["layers.1.fc1.X at step 6"]
    assert result.loss["left_at"] == 10
    assert result.loss["diverged_at"] in (9, 10, 11)
    assert result.first["lead_steps"] == 6
    top = result.ranked[0]
    assert top["tensor"] == "input"
    assert top["layer"] in ("layers.0.fc2", "layers.1.fc1")
    assert top["metric"].startswith("row_sqnr")
    low, high = result.first["good_band"]
    assert not low <= result.first["value"] <= high
    assert "lr (0.001 and 0.01)" in result.verdict


LEAVES = (
    # (losses added at steps), left_at, diverged_at, the verdict says
    ({}, None, None, "in the forward. The loss stays in the good run's band (last"),
    ({10: 9.0}, 10, None, "6 steps before the loss. The loss leaves the good run's band at step 10 and returns."),
    (
        {5: 1.0, **dict.fromkeys(range(9, 13), 1.0)},
        5,
        9,
        "at step 5, and its running median stays above it from step 9 on.",
    ),
    (
        dict.fromkeys(range(4, 13), 1.0),
        4,
        4,
        "at the same step as the loss. The loss leaves the good run's band at step 4",
    ),
    ({3: 5.0}, 3, None, "1 step after the loss (its last look inside is at step 2). The loss leaves"),
    ({9: math.nan}, 9, None, "5 steps before the loss"),
    (
        dict.fromkeys(range(7, 13), math.nan),
        7,
        7,
        "leaves the good run's band at step 7, and its running median stays above it.",
    ),
)
"""A tensor leaves at step 4, seen at looks 1, 2, 4, 6, ...; the loss leaves at steps of its own."""


def test_a_lead_counts_to_the_first_exit_of_the_loss(tmp_path: Path) -> None:
    good, change = record(tmp_path / "good"), outliers_from(4, ("layers.0.fc2", "input"))
    for case, (added, left, stays, said) in enumerate(LEAVES):
        bad = record(tmp_path / str(case), change, loss=lambda step, added=added: 3 - 0.01 * step + added.get(step, 0))
        result = compare(good, bad)
        assert result.first is not None
        assert (result.loss["left_at"], result.loss["diverged_at"]) == (left, stays), added
        assert result.first["lead_steps"] == (None if left is None else left - 4), added
        assert said in result.verdict, result.verdict


def test_a_loss_that_is_logged_now_and_then_has_no_gaps_outside(tmp_path: Path) -> None:
    """The lines between two logged losses have none; they neither leave the band nor end the run."""
    good = record(tmp_path / "good")
    bad = record(tmp_path / "bad", loss=lambda step: 3 - 0.01 * step if step % 5 == 1 else None)
    assert compare(good, bad).loss["left_at"] is None


def test_the_backward_goes_the_other_way(tmp_path: Path) -> None:
    good = record(tmp_path / "good")
    both = outliers_from(4, ("layers.0.fc2", "grad_output"), factor=1e9)
    last = outliers_from(4, ("layers.1.fc1", "grad_output"), factor=1e9)
    bad = record(tmp_path / "bad", lambda n, t, s, x: last(n, t, s, both(n, t, s, x)), seed=1)
    first = compare(good, bad).first
    assert first is not None
    assert (first["layer"], first["direction"]) == ("layers.1.fc1", "backward")


def test_one_look_outside_is_not_enough_unless_it_is_the_last(tmp_path: Path) -> None:
    good = record(tmp_path / "good")

    def only(when: int) -> Change:
        def change(layer: str, tensor: str, step: int, x: Tensor) -> Tensor:
            if (layer, tensor, step) == ("layers.0.fc2", "input", when):
                x[0] *= 1e5
            return x

        return change

    assert compare(good, record(tmp_path / "once", only(6))).first is None
    last = compare(good, record(tmp_path / "last", only(STEPS[-1]))).first
    assert last is not None
    assert last["step"] == STEPS[-1]


def test_a_control_run_widens_the_band(tmp_path: Path) -> None:
    good = record(tmp_path / "good")
    wide = outliers_from(1, ("layers.0.fc2", "input"))
    bad, control = record(tmp_path / "bad", wide, seed=1), record(tmp_path / "control", wide, seed=2)
    assert compare(good, bad).first is not None
    assert compare(good, bad, controls=[control]).first is None


def test_bits_put_units_on_one_scale() -> None:
    by_name = {metric.name: metric for metric in METRICS}
    assert by_name["row_sqnr_p50_db"].bits(6.02, 4) == pytest.approx(1)
    assert by_name["underflow_pct"].bits(25.0, 4) == 1
    assert by_name["rms"].bits(-8.0, 4) == by_name["rms"].bits(8.0, 4) == 1


def test_what_got_better_is_no_damage(tmp_path: Path) -> None:
    good = record(tmp_path / "good")
    bad = record(tmp_path / "bad", lambda layer, tensor, step, x: x / 1024, seed=1)  # MSE falls by 20 octaves
    result = compare(good, bad)
    assert not [entry for entry in result.ranked if entry["metric"] == "mse"]
    assert result.ranked[0]["metric"] in ("rms", "amax")
    assert result.first is not None
    assert result.first["metric"] in ("rms", "amax")


def test_sqnr_above_the_formats_own_is_not_missed(tmp_path: Path) -> None:
    def nearly_exact(noise: float) -> Change:
        def change(layer: str, tensor: str, step: int, x: Tensor) -> Tensor:
            return torch.exp2((x > 0).float()) * (1 + noise * torch.tanh(x))  # E4M3 rounds the noise away

        return change

    good, bad = record(tmp_path / "good", nearly_exact(0.001)), record(tmp_path / "bad", nearly_exact(0.01))
    a, b = (float(run.table().where(tensor="input").metric("row_sqnr_p50_db").min()) for run in (good, bad))
    assert a - 3 > b > 36  # a drop that leaves the band, far above E4M3's 31.6 dB
    result = compare(good, bad)
    assert not [entry for entry in result.ranked if entry["unit"] == "dB"]
    assert result.first is None or not result.first["metric"].endswith("_db")


def test_tokens_pair_runs_of_different_batch_sizes(tmp_path: Path) -> None:
    good = record(tmp_path / "good", tokens=100)
    bad = record(tmp_path / "bad", seed=1, tokens=50, every=2)  # twice the steps for the same tokens
    assert compare(good, bad, align="tokens").steps_compared == len(STEPS)
    assert compare(good, bad, align="tokens").first is None


def test_wrappers_do_not_hide_layers(tmp_path: Path) -> None:
    good = record(tmp_path / "good")
    change = outliers_from(4, ("module._orig_mod.layers.0.fc2", "input"))
    bad = record(tmp_path / "bad", change, seed=1, layers=tuple(f"module._orig_mod.{n}" for n in LAYERS))
    first = compare(good, bad).first
    assert first is not None
    assert first["layer"] == "layers.0.fc2"


def test_layers_of_other_names_are_paired_by_order(tmp_path: Path) -> None:
    good = record(tmp_path / "good")
    bad = record(tmp_path / "bad", seed=1, layers=("a.in", "a.out", "b.in", "b.out"))
    result = compare(good, bad)
    assert result.unmatched == []
    assert result.first is None


def test_refusals(tmp_path: Path) -> None:
    good, other = record(tmp_path / "good"), record(tmp_path / "other", layers=("x",))
    with pytest.raises(RunError, match="the runs share no cast"):
        compare(good, other)
    with pytest.raises(ValueError, match="did you mean 'tokens'"):
        compare(good, good, align="token")


def test_the_result_is_plain_json(tmp_path: Path) -> None:
    import json

    good = record(tmp_path / "good")
    bad = record(tmp_path / "bad", outliers_from(4, ("layers.0.fc2", "input")), loss=lambda s: float("nan"))
    values = compare(good, bad).to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert set(values) >= {"config", "loss", "ranked", "first", "steps_compared", "verdict"}
