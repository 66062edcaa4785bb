"""Scaling state in two and in three processes: the same histories everywhere, no hang, whatever a rank leaves out.

One start of the processes runs all scenarios of a world size. Gloo, CPU only.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import failures, scenarios_of, start

from scaling_samples import differences, network

SCENARIOS = scenarios_of(
    *("state_scenarios", "state_scenarios_join"),
    *("state_scenarios_sharded", "state_scenarios_modules"),
    "ddp_scenarios",
)
LONG = {"compiled", "compiled_models", "modules_under_ddp_and_fsdp2"}
"""Scenarios that cost seconds each."""
SHORT = [name for name in SCENARIOS if name.rpartition(".")[2] not in LONG]
SIZES = (2, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the world sizes share: the two write a checkpoint there, which the three read."""
    path = tmp_path_factory.mktemp("state")
    (path / "dcp").mkdir()
    return path


class Results(dict[int, list[dict[str, str]]]):
    """All scenarios of a world size, run once, when the first test asks for them."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, size: int) -> list[dict[str, str]]:
        for smaller in SIZES[: SIZES.index(size)]:
            self[smaller]  # they leave a checkpoint for the larger ones
        self[size] = start(size, self.folder / f"{size}", SHORT)
        return self[size]


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    """What each scenario said on each rank, by world size."""
    return Results(folder)


@pytest.mark.parametrize("size", [2, 3], ids=lambda size: f"{size} processes")
def test_every_scenario_holds_on_every_rank(results: Results, size: int) -> None:
    """See the scenarios' own docstrings. One test: workers of pytest-xdist would each start the processes again."""
    failed = failures(results[size], SHORT)
    assert not failed, "\n".join(failed)


def test_long_scenarios_hold_in_two_processes(tmp_path: Path) -> None:
    """Compiled code, and all modules. A third process would add nothing to them."""
    long = [name for name in SCENARIOS if name not in SHORT]
    assert len(long) == len(LONG)
    failed = failures(start(2, tmp_path / "long", long), long)
    assert not failed, "\n".join(failed)


def test_one_process_reads_what_two_have_written(results: Results, folder: Path) -> None:
    """The distributed checkpoint of the scenario, loaded without any process group into a plain model."""
    assert results[2][0]["state_scenarios_sharded.distributed_checkpoint"] == ""
    model = network(layers=3, seed=3)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder / "dcp" / "checkpoint", no_dist=True)
    model.load_state_dict(state["model"])
    assert differences(dict(model.state_dict()), torch.load(folder / "dcp" / "expected.pt")) == []
