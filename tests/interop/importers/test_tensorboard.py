"""Scalars of event files: losses, TransformerEngine's names, ours, those of hooks, and those that a user names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import ottava
from ottava.interop.event_file import EventWriter
from ottava.interop.importers import import_run
from ottava.interop.importers.collected import ImportRunError
from ottava.interop.importers.scalars import NUMBERS
from ottava.record.reader import Run


def imported(tmp_path: Path, *looks: dict[str, float], tags: dict[str, str] | None = None) -> Run:
    writer = EventWriter(tmp_path / "tb")
    for step, values in enumerate(looks, start=1):
        writer.scalars(step, values)
    writer.close()
    return import_run(tmp_path / "tb", tmp_path / "run", tags=tags)


@pytest.mark.parametrize("name, tag", [(name, tag) for name, tags in NUMBERS.items() for tag in tags])
def test_numbers_of_steps_under_their_usual_names(tmp_path: Path, name: str, tag: str) -> None:
    """Megatron, torchtitan, Lightning, Hugging Face."""
    steps = imported(tmp_path, {tag: 2.5}, {tag: 1.5}).steps
    assert steps["step"].tolist() == [1, 2]
    assert steps[name].tolist() == [2.5, 1.5]


def test_statistics_of_transformer_engine(tmp_path: Path) -> None:
    """Its TensorBoard logger uses the names of its text log, with all digits: ratios are good however small."""
    run = imported(
        tmp_path,
        {
            "layers.3.fc2_activation_mse": 1e-8,
            "layers.3.fc2_activation_std": 1e-3,
            "layers.3.fc2_activation_mean": 0.0,
            "layers.3.fc2_activation_underflows%": 12.5,
            "loss": 2.0,
        },
    )
    (row,) = run.table().dicts("sqnr_db", "underflow_pct")
    assert (row["layer"], row["tensor"]) == ("layers.3.fc2", "input")
    assert row["sqnr_db"] == pytest.approx(20.0, abs=1e-4)  # fp32 in the file
    assert row["underflow_pct"] == 12.5
    assert run.steps["loss"].tolist() == [2.0]


@pytest.mark.parametrize(
    "tag, where, name, value",
    [
        ("tensor/layers.1.fc2/X/underflow_pct", ("layers.1.fc2", "input", "row"), "underflow_pct", 50.0),
        ("tensor/layers.1.fc2/dY.T/row_sqnr_p50_db", ("layers.1.fc2", "grad_output", "col"), "row_sqnr_p50_db", 20.0),
        ("layers.0.wq/weight/amax", ("layers.0.wq", "weight", "row"), "amax", 3.0),
        ("layers.0.wq.input.sqnr", ("layers.0.wq", "input", "row"), "sqnr_db", 28.5),
        ("layers.0.wq/grad_output/scale", ("layers.0.wq", "grad_output", "row"), "scale_max", 64.0),
    ],
)
def test_statistics_under_other_names(
    tmp_path: Path, tag: str, where: tuple[str, str, str], name: str, value: float
) -> None:
    """Those of our own sink, and what hooks around torchao's layers write."""
    (row,) = imported(tmp_path, {tag: value}).table().dicts(name)
    assert (row["layer"], row["tensor"], row["direction"]) == where
    assert row[name] == value


def test_a_user_names_tags_and_the_rest_is_counted(tmp_path: Path) -> None:
    """tags={"my/objective": "loss"}."""
    run = imported(tmp_path, {"my/objective": 3.0, "throughput": 7.0}, tags={"my/objective": "loss"})
    assert run.steps["loss"].tolist() == [3.0]
    assert run.manifest["imported"]["not_understood"] == {"throughput": 1}


def test_nothing_understood_is_an_error(tmp_path: Path) -> None:
    """Naming what was there; a damaged file is noted."""
    with pytest.raises(ImportRunError, match=r"throughput \(1x\)"):
        imported(tmp_path, {"throughput": 7.0})
    damaged = tmp_path / "tb" / "events.out.tfevents.1"
    damaged.write_bytes(b"no event file, no event file")
    with pytest.raises(ImportRunError, match="is no TensorBoard event file"):
        import_run(damaged, tmp_path / "run2")


def test_losses_of_a_resumed_run_are_one_series(tmp_path: Path) -> None:
    """Two event files; of a step that is in both, one line."""
    for steps in ((1, 2, 3), (3, 4)):
        writer = EventWriter(tmp_path / "tb")
        for step in steps:
            writer.scalars(step, {"train/loss": float(step)})
        writer.close()
    steps_read = import_run(tmp_path / "tb", tmp_path / "run").steps
    assert np.array_equal(steps_read["loss"], [1, 2, 3, 4])


def test_what_our_own_watch_sends_comes_back(tmp_path: Path) -> None:
    """A watched training step with the TensorBoard sink, imported: the worst tensors with the numbers of the run."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ottava.watch(model, tmp_path / "run", sinks=["tensorboard"]) as seen:
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
    run = Run.open(seen.folder)
    back = import_run(tmp_path / "run" / "tensorboard", tmp_path / "back")
    assert back.steps["loss"].tolist() == pytest.approx(run.steps["loss"].tolist())
    table, again = run.table().where(direction="row"), back.table().where(direction="row")
    assert {(key.layer, key.tensor) for key in again.slots()} == {(key.layer, key.tensor) for key in table.slots()}
    for key, rows in table.groups():
        (amax,) = again.where(layer=key.layer, tensor=key.tensor).metric("amax")
        assert amax == pytest.approx(rows.metric("amax")[0])
