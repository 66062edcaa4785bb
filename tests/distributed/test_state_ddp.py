"""Scaling state in two and in three processes: the same histories everywhere, no hang, whatever a rank leaves out.

One start of the processes runs all scenarios of a world size. Gloo, CPU only.
"""

from __future__ import annotations

import json
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import state_scenarios
import state_scenarios_experts
import state_scenarios_sharded
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from state_scenarios import World

import warm
from scaling_samples import differences, network

SCENARIOS = (
    *state_scenarios.SCENARIOS,
    *state_scenarios_sharded.SCENARIOS,
    *state_scenarios_experts.SCENARIOS,
)
SIZES = (2, 3)
_LIMIT = 240


def run_all(rank: int, size: int, folder: str) -> None:
    """What each process does: all scenarios in turn, until one fails, since the ranks then no longer agree."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    results: dict[str, str] = {}
    for scenario in SCENARIOS:
        torch.manual_seed(0)
        try:
            scenario(World(rank, size, folder))
            results[scenario.__name__] = ""
        except Exception:
            results[scenario.__name__] = traceback.format_exc()
        Path(folder, f"{rank}.json").write_text(json.dumps(results))
        if results[scenario.__name__]:
            break
        dist.barrier()
    dist.destroy_process_group()


def start(size: int, folder: Path) -> list[dict[str, str]]:
    """The results of each rank."""
    folder.mkdir()
    context = warm.start_ranks(run_all, (size, str(folder)), size)
    deadline = time.monotonic() + _LIMIT
    try:
        while not context.join(timeout=1) and time.monotonic() < deadline:
            pass
    finally:
        for process in context.processes:
            if process.is_alive():
                process.terminate()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


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
        self[size] = start(size, self.folder / f"{size}")
        return self[size]


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    """What each scenario said on each rank, by world size."""
    return Results(folder)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)], ids=lambda size: f"{size} processes")
def test_every_scenario_holds_on_every_rank(results: Results, size: int) -> None:
    """See the scenarios' own docstrings. One test: workers of pytest-xdist would each start the processes again."""
    failures = [
        f"{scenario.__name__}, rank {rank}: {said}"
        for scenario in SCENARIOS
        for rank, answers in enumerate(results[size])
        if (said := answers.get(scenario.__name__, "was not run: an earlier scenario failed"))
    ]
    assert not failures, "\n".join(failures)


def test_one_process_reads_what_two_have_written(results: Results, folder: Path) -> None:
    """The distributed checkpoint of the scenario, loaded without any process group into a plain model."""
    assert results[2][0]["distributed_checkpoint"] == ""
    model = network(layers=3, seed=3)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder / "dcp" / "checkpoint", no_dist=True)
    model.load_state_dict(state["model"])
    assert differences(dict(model.state_dict()), torch.load(folder / "dcp" / "expected.pt")) == []


def test_every_scenario_is_listed() -> None:
    """A scenario that is written and not run proves nothing."""
    written = {
        thing
        for module in (state_scenarios, state_scenarios_sharded, state_scenarios_experts)
        for thing in vars(module).values()
        if callable(thing) and getattr(thing, "__annotations__", {}).keys() == {"world", "return"}
    }
    assert written == set(SCENARIOS)
