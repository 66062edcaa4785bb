"""Which casts are written out, seen through a watched run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ottava
from ottava.record.dumps import TensorDump, read_dump
from ottava.record.reader import Run
from ottava.watching.session import watch


def train(
    folder: Path, dump: dict[str, Any], *, recipe: str | None, steps: int = 4, spike: int = 0, **more: Any
) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).bfloat16()
    if recipe:
        ottava.convert(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, folder, every=1000, dump=dump, **more) as seen:
        for step in range(1, steps + 1):
            x = torch.randn(300, 64).bfloat16() * (1000 if step == spike else 1)
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return Run.open(seen.folder)


def dumps_of(run: Run) -> list[TensorDump]:
    found = [read_dump(path) for path in sorted((run.path / "dumps").glob("*.safetensors"))]
    assert all(isinstance(dump, TensorDump) for dump in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("recipe", [None, "rowwise"])
def test_what_is_asked_for_is_written(recipe: str | None, tmp_path: Path) -> None:
    """In that step, of those layers and tensors: the whole cast, also where the statistics are of a sample."""
    dump = {"steps": [3], "layers": "2", "tensors": ["X"], "rows": 0}
    several = dumps_of(train(tmp_path / "run", dump, recipe=recipe, sample=2))
    found = next(one for one in several if one.key.direction == "row")
    assert (found.step, found.key.layer, found.key.tensor) == (3, "2", "input")
    assert found.x_q is not None
    assert found.x.shape == found.x_q.shape == (300, 64)
    again = ottava.quantize(found.x, found.x_q.spec)
    assert torch.equal(again.data.view(torch.uint8), found.x_q.data.view(torch.uint8))


def test_a_step_to_be_dumped_is_looked_at(tmp_path: Path) -> None:
    """Although it is not due; without layers, all of them."""
    run = train(tmp_path / "run", {"steps": [3], "tensors": ["W"]}, recipe="tensorwise")
    assert 3 in run.table()["step"]
    assert {dump.key.layer for dump in dumps_of(run)} == {"0", "2"}
    assert [event["kind"] for event in run.events] == ["dump", "dump"]


def test_the_worst_are_written_after_a_trigger(tmp_path: Path) -> None:
    """The casts of the lowest row SQNR at the last look, at the next one."""
    run = train(tmp_path / "run", {"on_trigger": 2}, recipe="tensorwise", steps=24, spike=20)
    found = dumps_of(run)
    assert [dump.step for dump in found] == [21, 21]
    assert {dump.key.tensor for dump in found} == {"grad_output"}  # E5M2 has fewer bits


def test_the_quota_is_kept(tmp_path: Path) -> None:
    """With one warning, and the run goes on."""
    run = train(tmp_path / "run", {"steps": [2, 3], "quota_gb": 60e3 / 2**30}, recipe="tensorwise")
    assert sum(path.stat().st_size for path in (run.path / "dumps").iterdir()) <= 60e3
    assert [event["kind"] for event in run.events].count("warning") == 1
    assert len(run.steps["step"]) == 4
